// Lets long waits notice signals: the bindings install a check that runs Python's handlers.
#pragma once

namespace pydist {

// Installs the check (may throw whatever the handler raises). Process-wide, set once at import.
void set_interrupt_check(void (*check)());

// Runs the installed check, if any. Called by waits about ten times a second.
void check_interrupt();

}  // namespace pydist
