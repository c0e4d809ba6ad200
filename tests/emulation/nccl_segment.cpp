#include "nccl_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

#include "base/check.h"

namespace pydist::emulation {

namespace {

std::mutex mutex;
std::map<uint64_t, int>& own_descriptors() {
  static auto* descriptors = new std::map<uint64_t, int>();
  return *descriptors;
}

}  // namespace

SegmentName make_segment() {
  const int fd = memfd_create("emulated-nccl", MFD_CLOEXEC);
  PYDIST_CHECK_SYSTEM(fd, "memfd_create");
  PYDIST_CHECK_SYSTEM(ftruncate(fd, sizeof(Segment)), "ftruncate");
  struct stat status = {};
  PYDIST_CHECK_SYSTEM(fstat(fd, &status), "fstat");
  const std::lock_guard<std::mutex> lock(mutex);
  own_descriptors()[status.st_ino] = fd;
  return {getpid(), fd, status.st_ino};
}

std::shared_ptr<Segment> open_segment(const SegmentName& name) {
  const std::string path = concat("/proc/", name.pid, "/fd/", name.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat status = {};
  void* memory = MAP_FAILED;
  if (fstat(fd, &status) == 0 && status.st_ino == name.number) {
    memory = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<Segment*>(memory), [](Segment* s) { munmap(s, sizeof(Segment)); }};
}

void forget_segment(const SegmentName& name) {
  if (name.pid != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = own_descriptors().find(name.number);
  if (found == own_descriptors().end()) return;
  close(found->second);
  own_descriptors().erase(found);
}

}  // namespace pydist::emulation
