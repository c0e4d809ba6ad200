// The ring all-reduce, for any transport: what follows what, on two queues of work.
//
// One queue moves segments between ranks, the other adds. While one segment is being added, the
// next is under way:
//
//   mover   move 0   move 1   move 0'  move 1'  ...     (' : of the next step)
//   adder            add 0    add 1    add 0'   ...
//
// Segment k is moved again once its addition in the step before is done: that made what is sent,
// and emptied the place for what arrives. There is one such place per segment in flight.
//
// A Transport has
//
//   mover(), adder()                     the queues
//   moved(k), added(k)                   an event each per segment in flight: record(queue), and
//                                        block(queue) until what was recorded last is done
//   begin(queue)                         makes all own elements ready to be sent and added to
//   exchange(queue, sent, received, k, adds)
//                                        sends to the next rank, receives from the one before: into
//                                        place k to be added, or, a complete sum, where sums are
//                                        sent from. Either may be empty, or both: all ranks
//                                        exchange equally often.
//   add(queue, segment, k, completes)    adds the own elements to what is in place k, ready to be
//                                        sent
//   delivers(), deliver(queue, segment)  makes a complete sum the result; where delivers() is
//                                        false it is already
#pragma once

#include "collective/ring_plan.h"

namespace pydist {

// Of two ranks or more. All work comes before what is given to the mover from then on.
template <class Transport>
void run_ring(const RingPlan& plan, Transport& transport) {
  const auto mover = transport.mover();
  const auto adder = transport.adder();
  transport.begin(mover);
  int last = -1;  // the event that the adder has recorded last
  for (int step = 0; step < plan.num_steps(); ++step) {
    for (int k = 0; k < plan.segments_in_flight(); ++k) {
      const RingSegment sent = plan.sent(step, k);
      const RingSegment received = plan.received(step, k);
      const bool adds = plan.adds(step);
      const bool delivers = transport.delivers() && (!adds || plan.completes(step));
      if (step > 0 && plan.adds(step - 1) && sent.count > 0) transport.added(k).block(mover);
      transport.exchange(mover, sent, received, k, adds);
      if (received.count == 0 || !(adds || delivers)) continue;
      transport.moved(k).record(mover);
      transport.moved(k).block(adder);
      if (adds) transport.add(adder, received, k, plan.completes(step));
      if (delivers) transport.deliver(adder, received);
      transport.added(k).record(adder);
      last = k;
    }
  }
  if (transport.delivers() && last >= 0) transport.added(last).block(mover);
}

}  // namespace pydist
