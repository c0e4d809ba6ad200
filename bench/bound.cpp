// The bound's loop: every buffer becomes the sum of all. Shares nothing with the engine's kernels.
#include <cstdint>

namespace {

// One pass for any number of buffers: the inner loops are unrolled, the outer one is vectorised.
template <int kNumBuffers>
void update(float* const* pointers, int64_t num_elements) {
  float* buffers[kNumBuffers];
  for (int k = 0; k < kNumBuffers; ++k) buffers[k] = pointers[k];
#pragma GCC ivdep
  for (int64_t i = 0; i < num_elements; ++i) {
    float sum = buffers[0][i];
    for (int k = 1; k < kNumBuffers; ++k) sum += buffers[k][i];
    for (int k = 0; k < kNumBuffers; ++k) buffers[k][i] = sum;
  }
}

}  // namespace

extern "C" void update_2(float* const* buffers, int64_t num_elements) {
  update<2>(buffers, num_elements);
}
extern "C" void update_4(float* const* buffers, int64_t num_elements) {
  update<4>(buffers, num_elements);
}
