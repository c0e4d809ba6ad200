// Tables of copies on a device whose streams run late: nothing is overwritten that is still to be
// read, nothing is done twice, and nothing is left behind.
#include "bucket/device_pack.h"

#include <memory>
#include <vector>

#include "check.h"
#include "late_device.h"

using namespace pydist;

namespace {

LateDevice device;

constexpr int64_t kCount = 1000;

struct Gradients {
  explicit Gradients(float first, int64_t count = kCount) : values(count), bucket(count) {
    for (int64_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  }
  std::vector<PackItem> items() {
    return {{values.data(), DType::kFloat32, bucket.data(), DType::kFloat32,
             static_cast<int64_t>(values.size())}};
  }
  bool is_copied() const { return values == bucket; }

  std::vector<float> values;
  std::vector<float> bucket;
};

void test_a_table_is_kept_while_nothing_changes() {
  DevicePack pack;
  const Stream stream = device.make_stream();
  Gradients gradients(1);
  pack.run(gradients.items(), {}, stream);
  const int num_allocations = device.num_allocations;
  const int num_launches = device.num_launches;
  for (int step = 0; step < 10; ++step) {
    gradients.values[0] = static_cast<float>(step);
    pack.run(gradients.items(), {}, stream);
    device.run(stream);
    CHECK(gradients.is_copied());
  }
  CHECK(pack.num_refreshes() == 1);
  CHECK(device.num_allocations == num_allocations);
  CHECK(device.num_launches == num_launches + 10);
}

// The host runs ahead of the device: every run has its own table's contents when its turn comes.
void test_a_pinned_buffer_is_not_written_while_it_is_read() {
  DevicePack pack;
  const Stream stream = device.make_stream();
  std::vector<std::unique_ptr<Gradients>> steps;
  for (int step = 0; step < 20; ++step) {
    steps.push_back(std::make_unique<Gradients>(static_cast<float>(step * 10)));
    pack.run(steps.back()->items(), {}, stream);
  }
  device.run(stream);
  for (const auto& gradients : steps) CHECK(gradients->is_copied());
  CHECK(pack.num_refreshes() == 20);
  const int num_allocations = device.num_allocations;
  for (const auto& gradients : steps) {
    pack.run(gradients->items(), {}, stream);
    device.run(stream);
  }
  CHECK(device.num_allocations == num_allocations);  // buffers that are free again serve
}

void test_a_table_grows_and_shrinks() {
  DevicePack pack;
  const Stream stream = device.make_stream();
  std::vector<std::unique_ptr<Gradients>> steps;
  for (const int64_t count : {10, 100000, 0, 20, 300000, 5}) {
    steps.push_back(std::make_unique<Gradients>(1.0f, count));
    pack.run(steps.back()->items(), {}, stream);
    if (count == 20) device.run(stream);
  }
  device.run(stream);
  for (const auto& gradients : steps) CHECK(gradients->is_copied());
}

void test_streams_do_not_share_a_table() {
  DevicePack pack;
  const Stream one = device.make_stream();
  const Stream other = device.make_stream();
  Gradients first(1);
  Gradients second(1000);
  pack.run(first.items(), {}, one);
  pack.run(second.items(), {}, other);
  device.run(other);
  CHECK(second.is_copied() && !first.is_copied());
  device.run(one);
  CHECK(first.is_copied());
}

// A graph goes on copying what it captured, whatever is run, or captured, after it.
void test_a_graph_has_its_own_table() {
  DevicePack pack;
  const Stream stream = device.make_stream();
  Gradients captured(1);
  Gradients eager(1000);
  pack.run(captured.items(), {}, stream);
  device.run(stream);
  device.capturing = stream;
  pack.run(captured.items(), {}, stream);
  const auto graph = device.end_capture();
  pack.run(eager.items(), {}, stream);
  device.run(stream);
  CHECK(eager.is_copied());
  for (int launch = 0; launch < 2; ++launch) {
    captured.values[5] += 1;
    eager.values[5] += 1;
    for (const auto& work : graph) work();
    CHECK(captured.is_copied() && !eager.is_copied());
  }
  pack.run(eager.items(), {}, stream);
  device.run(stream);
  CHECK(eager.is_copied());
}

void test_options_reach_the_kernel() {
  DevicePack pack;
  const Stream stream = device.make_stream();
  Gradients gradients(0);
  std::vector<float> partials(num_copy_partials(), -1.0f);
  float found = 0;
  DevicePackOptions options;
  options.scale = 2;
  options.partials = partials.data();
  options.found_nonfinite = &found;
  pack.run(gradients.items(), options, stream);
  device.run(stream);
  double expected = 0;
  double total = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    CHECK(gradients.bucket[i] == 2 * gradients.values[i]);
    expected += gradients.bucket[i] * gradients.bucket[i];
  }
  for (const float partial : partials) total += partial;
  CHECK(total > expected * 0.99999 && total < expected * 1.00001);
  CHECK(found == 0);
  gradients.values[7] = 1.0f / 0.0f;
  pack.run(gradients.items(), options, stream);
  pack.run({}, options, stream);  // sums of nothing
  device.run(stream);
  CHECK(found == 1 && partials[0] == 0);
}

}  // namespace

int main() {
  set_device_runtime(&device);
  for (const auto test : {test_a_table_is_kept_while_nothing_changes,
                          test_a_pinned_buffer_is_not_written_while_it_is_read,
                          test_a_table_grows_and_shrinks, test_streams_do_not_share_a_table,
                          test_a_graph_has_its_own_table, test_options_reach_the_kernel}) {
    test();
  }
  CHECK(device.num_live == 0);
  std::puts("device_pack_test: passed");
}
