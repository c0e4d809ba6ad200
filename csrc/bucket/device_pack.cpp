#include "bucket/device_pack.h"

#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "base/check.h"
#include "bucket/copy_tiles.h"

namespace pydist {

namespace {

constexpr auto kDestructionLimit = std::chrono::seconds(5);

int64_t num_warps() { return int64_t{num_copy_partials()} * (kCopyMany.num_threads / 32); }

// How items are cut on the current device.
struct Cut {
  explicit Cut(const std::vector<PackItem>& items)
      : tile_nbytes(tile_nbytes_for(items, num_warps())),
        num_tiles(count_tiles(items, tile_nbytes)),
        table_nbytes(static_cast<size_t>(num_tiles) * sizeof(CopyTile)) {
    PYDIST_CHECK(num_tiles <= std::numeric_limits<int32_t>::max() / 2, UsageError, num_tiles,
                 " tiles do not fit into one launch");
  }

  int64_t tile_nbytes;
  int64_t num_tiles;
  size_t table_nbytes;
};

// Twice as much as is asked for, so that a table which grows does not grow every time.
size_t roomy(size_t nbytes) { return nbytes + nbytes; }

}  // namespace

DevicePack::~DevicePack() {
  if (device_ < 0) return;
  try {
    const DeviceGuard guard(device_);
    if (wait_for_streams()) free_all();
  } catch (const std::exception&) {
    // The device has failed: what it may still use is left to the end of the process.
  }
}

bool DevicePack::wait_for_streams() const {
  const auto limit = std::chrono::steady_clock::now() + kDestructionLimit;
  for (const auto& table : tables_) {
    if (device_runtime()->is_capturing(table->stream)) return false;
    OwnedEvent done;
    done.record(table->stream);
    while (!done.is_complete()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

void DevicePack::free_all() {
  DeviceRuntime& runtime = *device_runtime();
  for (const auto& table : tables_) {
    if (table->device.data != nullptr) runtime.deallocate(table->device.data);
    for (const Staging& staging : table->staging) {
      if (staging.pinned.data != nullptr) runtime.free_pinned(staging.pinned.data);
    }
  }
  for (void* memory : kept_) runtime.deallocate(memory);
  for (void* memory : kept_pinned_) runtime.free_pinned(memory);
}

void DevicePack::run(const std::vector<PackItem>& items, const DevicePackOptions& options,
                     Stream stream) {
  if (device_ < 0) device_ = device_runtime()->current_device();
  if (device_runtime()->is_capturing(stream)) return run_captured(items, options, stream);
  Table& table = table_of(stream);
  if (!(table.items == items)) refresh(table, items);
  launch(table.device.data, table.num_tiles, options, stream);
}

DevicePack::Table& DevicePack::table_of(Stream stream) {
  for (const auto& table : tables_) {
    if (table->stream == stream) return *table;
  }
  tables_.push_back(std::make_unique<Table>());
  tables_.back()->stream = stream;
  return *tables_.back();
}

void DevicePack::refresh(Table& table, const std::vector<PackItem>& items) {
  const Cut cut(items);
  table.items.clear();  // of no use if something raises on the way
  table.num_tiles = 0;
  if (cut.num_tiles > 0) {
    Staging& staging = staging_for(table, cut.table_nbytes);
    write_tiles(items, cut.tile_nbytes, static_cast<CopyTile*>(staging.pinned.data));
    if (table.device.nbytes < cut.table_nbytes) {
      if (table.device.data != nullptr) kept_.push_back(table.device.data);
      table.device = {};
      table.device = {device_runtime()->allocate(roomy(cut.table_nbytes)), roomy(cut.table_nbytes)};
    }
    device_runtime()->copy(table.device.data, staging.pinned.data, cut.table_nbytes, table.stream);
    staging.copied.record(table.stream);
  }
  table.items = items;
  table.num_tiles = static_cast<int32_t>(cut.num_tiles);
  ++num_refreshes_;
}

// One whose last copy is complete, or a further one.
DevicePack::Staging& DevicePack::staging_for(Table& table, size_t nbytes) {
  DeviceRuntime& runtime = *device_runtime();
  for (Staging& staging : table.staging) {
    if (!staging.copied.is_complete()) continue;
    if (staging.pinned.nbytes < nbytes) {
      const Memory small = std::exchange(staging.pinned, {});
      if (small.data != nullptr) kept_pinned_.push_back(small.data);  // to free it would wait
      staging.pinned = {runtime.allocate_pinned(roomy(nbytes)), roomy(nbytes)};
    }
    return staging;
  }
  table.staging.emplace_back();
  Staging& staging = table.staging.back();
  staging.pinned = {runtime.allocate_pinned(roomy(nbytes)), roomy(nbytes)};
  return staging;
}

void DevicePack::launch(const void* tiles, int32_t num_tiles, const DevicePackOptions& options,
                        Stream stream) {
  const bool inspects = options.found_nonfinite != nullptr || options.partials != nullptr;
  if (num_tiles == 0 && options.partials == nullptr) return;
  CopyManyArguments arguments;
  arguments.tiles = static_cast<const CopyTile*>(tiles);
  arguments.num_tiles = num_tiles;
  arguments.scale = options.scale;
  arguments.found_nonfinite = options.found_nonfinite;
  arguments.partials = options.partials;
  arguments.num_partials = options.partials == nullptr ? 0 : num_copy_partials();
  device_runtime()->launch(inspects ? kCopyManyInspect : kCopyMany, &arguments,
                           num_copy_blocks(num_tiles), stream);
}

// A graph replays its copy whenever it is launched, so neither end of it may ever be written again.
void DevicePack::run_captured(const std::vector<PackItem>& items, const DevicePackOptions& options,
                              Stream stream) {
  const Cut cut(items);
  if (cut.num_tiles == 0) return launch(nullptr, 0, options, stream);
  DeviceRuntime& runtime = *device_runtime();
  void* pinned = runtime.allocate_pinned(cut.table_nbytes);
  kept_pinned_.push_back(pinned);
  void* tiles = runtime.allocate(cut.table_nbytes);
  kept_.push_back(tiles);
  write_tiles(items, cut.tile_nbytes, static_cast<CopyTile*>(pinned));
  runtime.copy(tiles, pinned, cut.table_nbytes, stream);
  launch(tiles, static_cast<int32_t>(cut.num_tiles), options, stream);
  ++num_refreshes_;
}

}  // namespace pydist
