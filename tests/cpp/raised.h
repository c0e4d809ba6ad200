// What a call raised, for tests.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "check.h"

template <class ErrorType>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  CHECK(!"the error was not raised");
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return false;
}
