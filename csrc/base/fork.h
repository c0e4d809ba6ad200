// Tells whether this process is a forked child of one that used the engine.
#pragma once

namespace pydist {

// Registers the fork handler; called once by whoever first creates state that a child must not use.
void watch_forks();

// True in a child (a DataLoader worker, say) forked after watch_forks(). A plain load.
bool in_forked_child();

}  // namespace pydist
