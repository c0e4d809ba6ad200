#include "collective/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pydist {

void stream_copy(void* to, const void* from, size_t nbytes) {
#if defined(__SSE2__)
  constexpr size_t kLineNbytes = 64;
  constexpr size_t kMinNbytes = 4096;  // below, what the fence at the end costs is not won back
  if (reinterpret_cast<uintptr_t>(to) % kLineNbytes == 0 && nbytes >= kMinNbytes) {
    const size_t whole_nbytes = nbytes / kLineNbytes * kLineNbytes;
    const auto* source = static_cast<const uint8_t*>(from);
    auto* target = static_cast<uint8_t*>(to);
    for (size_t at = 0; at < whole_nbytes; at += kLineNbytes) {
      __m128i part[4];
      for (int k = 0; k < 4; ++k) {
        part[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at) + k);
      }
      for (int k = 0; k < 4; ++k) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + at) + k, part[k]);
      }
    }
    std::memcpy(target + whole_nbytes, source + whole_nbytes, nbytes - whole_nbytes);
    _mm_sfence();  // such stores are not ordered by a later release
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

}  // namespace pydist
