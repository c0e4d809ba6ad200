// What was found to be wrong. After the first fault every call of the device raises it, until the
// faults are taken.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"

namespace pydist::emulation {

class Fault : public Error {
 public:
  using Error::Error;
};

// Keeps the fault, and prints it.
void record_fault(const std::string& text);
bool has_fault();
// Raises Fault if one was recorded.
void raise_fault();
std::vector<std::string> take_faults();

}  // namespace pydist::emulation
