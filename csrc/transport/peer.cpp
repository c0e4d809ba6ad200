#include "transport/peer.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>

#include "base/check.h"
#include "base/cpu.h"
#include "transport/endpoint.h"

namespace pydist {

std::string ProcessCard::serialize() const {
  std::ostringstream out;
  for (const uint8_t byte : arena_token) out << static_cast<int>(byte) << ' ';
  out << endpoint << ' ' << pid << ' ' << uid << ' ' << static_cast<int>(isa);
  return out.str();
}

ProcessCard ProcessCard::parse(const std::string& text) {
  std::istringstream in(text);
  ProcessCard card;
  for (uint8_t& byte : card.arena_token) {
    int value = 0;
    in >> value;
    byte = static_cast<uint8_t>(value);
  }
  int isa = 0;
  in >> card.endpoint >> card.pid >> card.uid >> isa;
  card.isa = static_cast<uint8_t>(isa);
  PYDIST_CHECK(!in.fail(), ResourceError, "a peer's card cannot be read: \"", text,
               "\" (do all ranks run the same version of pydist?)");
  return card;
}

ProcessCard ProcessCard::mine() {
  ProcessCard card;
  card.arena_token = Arena::instance().token();
  card.endpoint = Endpoint::instance().address();
  card.pid = ::getpid();
  card.uid = ::geteuid();
  card.isa = static_cast<uint8_t>(detect_isa());
  return card;
}

namespace {

size_t file_nbytes(const Fd& fd) {
  struct stat status{};
  PYDIST_CHECK_SYSTEM(::fstat(fd.get(), &status), "cannot read the size of a peer's arena");
  return static_cast<size_t>(status.st_size);
}

std::shared_ptr<Peer> map_peer(const ProcessCard& card) {
  if (card.arena_token == Arena::instance().token()) {
    return std::make_shared<Peer>(card, Mapping(), Fd(), true);
  }
  Endpoint::Fetched fetched = Endpoint::fetch(card.endpoint, card.arena_token, card.uid);
  Mapping mapping(fetched.fd.get(), file_nbytes(fetched.fd), ForkBehavior::kHide);
  const auto* control = reinterpret_cast<const ArenaControl*>(mapping.data());
  PYDIST_CHECK(control->token == card.arena_token, ResourceError,
               "its arena shows another token than it announced");
  return std::make_shared<Peer>(card, std::move(mapping), std::move(fetched.pidfd), false);
}

}  // namespace

std::shared_ptr<Peer> Peer::connect(const ProcessCard& card) {
  static std::mutex mutex;
  static auto* known = new std::map<Token, std::weak_ptr<Peer>>();
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = known->begin(); entry != known->end();) {
    entry = entry->second.expired() ? known->erase(entry) : std::next(entry);
  }
  std::weak_ptr<Peer>& entry = (*known)[card.arena_token];
  std::shared_ptr<Peer> peer = entry.lock();
  if (peer == nullptr) {
    peer = map_peer(card);
    entry = peer;
  }
  return peer;
}

Peer::Peer(const ProcessCard& card, Mapping mapping, Fd pidfd, bool is_self)
    : pid_(card.pid),
      mapping_(std::move(mapping)),
      pidfd_(std::move(pidfd)),
      base_(is_self ? Arena::instance().base() : mapping_.data()),
      is_self_(is_self) {}

bool Peer::alive() const {
  // The futex word is the first member of glibc's mutex: the owner's thread id, and a mark by the
  // kernel once that thread died. Acquire: whatever the process published before is visible to who
  // sees it dead.
  const auto* control = reinterpret_cast<const ArenaControl*>(base_);
  const auto* word = reinterpret_cast<const std::atomic<uint32_t>*>(&control->life);
  const uint32_t value = word->load(std::memory_order_acquire);
  return (value & FUTEX_OWNER_DIED) == 0 && (value & FUTEX_TID_MASK) != 0;
}

bool Peer::gone() const {
  if (is_self_ || !pidfd_.valid()) return false;
  pollfd poll_fd{pidfd_.get(), POLLIN, 0};
  return ::poll(&poll_fd, 1, 0) == 1;
}

}  // namespace pydist
