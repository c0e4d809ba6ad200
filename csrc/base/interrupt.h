// Lets long waits notice signals: the bindings install a check that runs Python's handlers.
#pragma once

#include <signal.h>

namespace pydist {

// Installs the check (may throw whatever the handler raises). Process-wide, set once at import.
void set_interrupt_check(void (*check)());

// Runs the installed check, if any. Called by waits about ten times a second.
void check_interrupt();

// The thread runs no checks while one lives: the engine's own threads handle no signals, and must
// not enter Python while it ends.
class WithoutInterrupts {
 public:
  WithoutInterrupts();
  ~WithoutInterrupts();
};

// A thread started while this lives inherits a mask of all signals, so that the program's own
// threads handle them.
class BlockSignals {
 public:
  BlockSignals();
  ~BlockSignals();

 private:
  sigset_t saved_;
};

}  // namespace pydist
