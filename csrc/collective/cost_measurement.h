// The timed calls that the cost model is fitted to, and the ranks' agreement on them.
#pragma once

#include <memory>

#include "collective/cost_model.h"
#include "collective/nccl_communicator.h"

namespace pydist {

// Collective; waits for the device. All ranks get the same model, of each call's time on the rank
// where it took longest. Takes a few milliseconds where the ranks are close to each other, and some
// hundred where a call of 256 KiB takes one.
CostModel measure_costs(const std::shared_ptr<NcclCommunicator>& communicator);

}  // namespace pydist
