// One process of this host as seen from another: its arena, and whether it lives.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/mapping.h"
#include "transport/arena.h"

namespace pydist {

// What a process tells its peers about itself through the Store.
struct ProcessCard {
  Token arena_token{};   // names the arena at the endpoint, and is read back through the mapping
  std::string endpoint;  // abstract socket address
  int32_t pid = 0;
  uint32_t uid = 0;
  uint8_t isa = 0;

  std::string serialize() const;
  static ProcessCard parse(const std::string& text);
  // This process's own card; starts the arena and the endpoint where they are not yet there.
  static ProcessCard mine();
};

class Peer {
 public:
  // Connects, maps the peer's arena and checks its token through the mapping; peers are shared
  // between groups. Raises HostError's reason as ResourceError where memory cannot be shared.
  static std::shared_ptr<Peer> connect(const ProcessCard& card);
  Peer(const ProcessCard& card, Mapping mapping, Fd pidfd, bool is_self);

  int pid() const { return pid_; }
  uint8_t* arena_base() const { return base_; }
  // False as soon as the kernel has begun to end the process (its life mutex lost its owner).
  bool alive() const;
  // True once the process is entirely gone, so that none of its threads can store any more. A
  // system call.
  bool gone() const;

 private:
  int pid_;
  Mapping mapping_;  // empty for this process itself
  Fd pidfd_;
  uint8_t* base_;
  bool is_self_;
};

}  // namespace pydist
