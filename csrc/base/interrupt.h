// Lets long waits notice signals: the bindings install a check that runs Python's handlers.
#pragma once

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

}  // namespace pydist
