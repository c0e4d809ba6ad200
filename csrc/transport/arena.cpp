#include "transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "base/fork.h"
#include "base/limits.h"

namespace pydist {

namespace {

constexpr size_t kPageNbytes = 4096;
constexpr size_t kMinCapacityNbytes = size_t{1} << 20;
// Extents grow with the arena: few system calls for large models, little waste for small ones.
constexpr size_t kMinExtentNbytes = size_t{2} << 20;
constexpr size_t kMaxExtentNbytes = size_t{256} << 20;

std::atomic<Arena*> existing_arena{nullptr};

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

size_t limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return limit.rlim_cur;
}

// Address space to reserve: the machine's memory, as far as limits on files and address space
// allow.
size_t choose_capacity() {
  const size_t physical = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * kPageNbytes;
  const size_t file_limit = limit_of(RLIMIT_FSIZE);
  // Every rank maps every rank's arena: leave most of a limited address space to the others.
  const size_t address_limit = limit_of(RLIMIT_AS);
  size_t capacity = std::min(physical, file_limit);
  if (address_limit != SIZE_MAX) capacity = std::min(capacity, address_limit / 16);
  capacity = capacity / kPageNbytes * kPageNbytes;
  PYDIST_CHECK(capacity >= kMinCapacityNbytes, ResourceError,
               "the shared-memory arena needs at least 1 MiB, but limits allow ", capacity,
               " bytes; raise `ulimit -f` (file size) and `ulimit -v` (address space)");
  return capacity;
}

// Refuses what the system or the container has not got: under a memory cgroup the kernel would
// rather kill a process.
int allocate_pages(int fd, size_t begin, size_t end) {
  if (end - begin > available_memory()) {
    errno = ENOMEM;
    return -1;
  }
  int result = 0;
  do {
    result = ::fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  } while (result < 0 && errno == EINTR);
  return result;
}

}  // namespace

Fd make_memfd(const char* name, size_t nbytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  PYDIST_CHECK_SYSTEM(fd.get(), "memfd_create failed");
  PYDIST_CHECK_SYSTEM(::ftruncate(fd.get(), static_cast<off_t>(nbytes)), "cannot size ", nbytes,
                      " bytes of shared memory (raise `ulimit -f`)");
  PYDIST_CHECK_SYSTEM(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
                      "cannot seal shared memory");
  return fd;
}

void charge_memory(const Fd& fd, size_t begin, size_t end) {
  PYDIST_CHECK_SYSTEM(allocate_pages(fd.get(), begin, end), "the system has no memory for ",
                      end - begin,
                      " bytes of shared memory; use fewer ranks, a smaller model, or raise the "
                      "memory limit of the container");
}

Token make_token() {
  Token token{};
  PYDIST_CHECK_SYSTEM(::getrandom(token.data(), token.size(), 0), "getrandom failed");
  return token;
}

Arena& Arena::instance() {
  static Arena* arena = new Arena();  // leaked: blocks may be given back during exit
  return *arena;
}

Arena* Arena::if_exists() { return existing_arena.load(std::memory_order_acquire); }

Arena::Arena() : capacity_(choose_capacity()) {
  fd_ = make_memfd("pydist-arena", capacity_);
  // Leaked as well: were it unmapped during exit, the kernel could not mark the life mutex in it as
  // its owner's thread ends, and peers would wait for a process that is gone.
  static auto* mapping = new Mapping(fd_.get(), capacity_, ForkBehavior::kInherit);
  base_ = mapping->data();
  ::madvise(base_, capacity_, MADV_DONTDUMP);
  charge_memory(fd_, 0, kPageNbytes);
  committed_ = kPageNbytes;
  blocks_ = BlockAllocator(kPageNbytes, capacity_);
  control()->token = make_token();
  control()->pid = ::getpid();
  watch_forks();
  existing_arena.store(this, std::memory_order_release);
  ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void Arena::before_fork() { if_exists()->mutex_.lock(); }

void Arena::after_fork_in_parent() { if_exists()->mutex_.unlock(); }

// A child keeps its parent's tensors readable, but what it writes stays private. (Not a snapshot:
// pages that the child has not yet written may show what the parent and its peers write later.)
void Arena::after_fork_in_child() {
  Arena* arena = if_exists();
  void* mapped = ::mmap(arena->base_, arena->capacity_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, arena->fd_.get(), 0);
  if (mapped == MAP_FAILED) ::_exit(127);  // sharing on would corrupt the parent
  arena->mutex_.unlock();
}

bool Arena::commit(size_t end_offset) noexcept {
  if (end_offset <= committed_) return true;
  const size_t extent = std::clamp(committed_ / 4, kMinExtentNbytes, kMaxExtentNbytes);
  const size_t generous =
      std::min(capacity_, round_up(std::max(end_offset, committed_ + extent), kMinExtentNbytes));
  const size_t exact = std::min(capacity_, round_up(end_offset, kPageNbytes));
  for (const size_t end : {generous, exact}) {
    if (allocate_pages(fd_.get(), committed_, end) == 0) {
      committed_ = end;
      return true;
    }
  }
  return false;
}

void* Arena::try_allocate(size_t nbytes) noexcept {
  if (in_forked_child()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto offset = blocks_.allocate(nbytes);
  if (!offset) return nullptr;
  if (!commit(*offset + blocks_.block_nbytes(*offset))) {
    blocks_.deallocate(*offset);
    return nullptr;
  }
  return base_ + *offset;
}

void* Arena::allocate(size_t nbytes) {
  void* pointer = try_allocate(nbytes);
  PYDIST_CHECK(pointer != nullptr, ResourceError, "the arena cannot give ", nbytes, " bytes (",
               used_nbytes(), " of ", capacity_,
               " in use); use fewer ranks on this host, keep fewer gradients alive, or raise the "
               "memory limit (container) or `ulimit -f`");
  return pointer;
}

void Arena::deallocate(void* pointer) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.deallocate(offset_of(pointer));
}

void Arena::pin(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.pin(offset_of(pointer));
}

void Arena::unpin(void* pointer) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.unpin(offset_of(pointer));
}

bool Arena::is_block(const void* pointer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return contains(pointer) && blocks_.is_block(offset_of(pointer));
}

size_t Arena::used_nbytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.used_nbytes();
}

size_t Arena::committed_nbytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return committed_;
}

}  // namespace pydist
