// Copies gradients into a bucket of a device, or out of it, by one kernel launch. No torch.
//
// What the kernel has to do stands in a table on the device. It is written anew, through pinned
// memory and on the stream of the launch, only where an item has changed since the last run:
//
//   items ──tiles──> pinned buffer ──copy──> table ──launch──> bucket
//
// Every stream has a table of its own, so that the stream's order protects it. A pinned buffer is
// written again only after its last copy is complete; until then another one serves.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/device_handles.h"
#include "bucket/pack.h"
#include "collective/device_kernels/copy_many.h"

namespace pydist {

struct DevicePackOptions {
  double scale = 1;  // multiplies floating and complex elements
  // Where not null, they are looked at: see CopyManyArguments. num_copy_partials() partial sums.
  float* found_nonfinite = nullptr;
  float* partials = nullptr;
};

// The tables of one bucket and direction, on the device that is current at the first run. Not for
// several threads at a time.
class DevicePack {
 public:
  DevicePack() = default;
  // Waits a while for what is enqueued, and leaves the memory alone where that does not end. The
  // streams, if there was a run, still exist; graphs that have captured a run are not launched any
  // more.
  ~DevicePack();
  DevicePack(const DevicePack&) = delete;
  DevicePack& operator=(const DevicePack&) = delete;

  // Enqueues the copies. While `stream` captures a graph, the graph gets a table of its own, which
  // every launch of it copies again from pinned memory that is kept as long as this object.
  void run(const std::vector<PackItem>& items, const DevicePackOptions& options, Stream stream);

  int64_t num_refreshes() const { return num_refreshes_; }  // of tables, for tests and reports

 private:
  // Of the device, or pinned: freed only after a look at what is under way.
  struct Memory {
    void* data = nullptr;
    size_t nbytes = 0;
  };
  struct Staging {
    Memory pinned;
    OwnedEvent copied;
  };
  struct Table {
    Stream stream = nullptr;
    std::vector<PackItem> items = {};
    int32_t num_tiles = 0;
    Memory device = {};
    std::vector<Staging> staging = {};
  };

  Table& table_of(Stream stream);
  void refresh(Table& table, const std::vector<PackItem>& items);
  Staging& staging_for(Table& table, size_t nbytes);
  void launch(const void* tiles, int32_t num_tiles, const DevicePackOptions& options,
              Stream stream);
  void run_captured(const std::vector<PackItem>& items, const DevicePackOptions& options,
                    Stream stream);
  bool wait_for_streams() const;
  void free_all();

  int device_ = -1;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<void*> kept_;         // of the device: outgrown tables, and those of graphs
  std::vector<void*> kept_pinned_;  // the same, of the host
  int64_t num_refreshes_ = 0;
};

}  // namespace pydist
