// The only macros of the project: conditions that raise typed errors.
#pragma once

#include <cerrno>
#include <cstring>

#include "base/error.h"

// Raises ErrorType with the concatenated arguments unless `condition` holds.
#define PYDIST_CHECK(condition, ErrorType, ...)                                            \
  do {                                                                                     \
    if (__builtin_expect(!(condition), 0)) throw ErrorType(::pydist::concat(__VA_ARGS__)); \
  } while (false)

// Raises ResourceError with errno's text unless the system call's result is not negative.
#define PYDIST_CHECK_SYSTEM(result, ...)                                    \
  do {                                                                      \
    if (__builtin_expect((result) < 0, 0)) {                                \
      const int saved_errno = errno;                                        \
      throw ::pydist::ResourceError(                                        \
          ::pydist::concat(__VA_ARGS__, ": ", std::strerror(saved_errno))); \
    }                                                                       \
  } while (false)
