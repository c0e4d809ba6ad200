#include "pipeline/recorder.h"

#include <sched.h>

#include "base/device_handles.h"
#include "base/interrupt.h"

namespace pydist {

// Without a call of the runtime's own for it: this looks at signals.
void Recorder::wait_for_device() {
  OwnedEvent now;
  now.record(device_runtime()->current_stream());
  while (!now.is_complete()) {
    check_interrupt();
    ::sched_yield();
  }
}

}  // namespace pydist
