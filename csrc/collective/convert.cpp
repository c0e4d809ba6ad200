#include "collective/convert.h"

#include <cstring>

#include "base/check.h"
#include "collective/convert_variants.h"
#include "collective/float_control.h"

namespace pydist {

void convert(DType from, const void* source, DType to, void* target, int64_t num_elements,
             Isa isa) {
  PYDIST_CHECK(is_convertible(from) && is_convertible(to), UsageError, dtype_name(from), " to ",
               dtype_name(to), " is not a conversion between floating types");
  if (num_elements == 0) return;
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(num_elements) * dtype_nbytes(to));
    return;
  }
  const DefaultFloatControl float_control;
  const ConvertArgs args{from, source, to, target, num_elements};
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return convert_avx512(args);
  if (isa == Isa::kAvx2) return convert_avx2(args);
#endif
  (void)isa;
  convert_baseline(args);
}

}  // namespace pydist
