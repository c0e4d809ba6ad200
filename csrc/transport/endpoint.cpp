#include "transport/endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>

#include "base/check.h"
#include "base/fork.h"

namespace pydist {

namespace {

constexpr int kAnswerTimeout_s = 5;  // of one exchange; both sides hold their message ready
std::atomic<int> listener_fd{-1};    // for the child's fork handler

struct Address {
  sockaddr_un storage{};
  socklen_t length = 0;
};

Address abstract_address(const std::string& name) {
  Address address;
  address.storage.sun_family = AF_UNIX;
  PYDIST_CHECK(name.size() + 1 <= sizeof(address.storage.sun_path), ResourceError,
               "endpoint name is too long: ", name);
  std::memcpy(address.storage.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

void limit_wait(int connection) {
  timeval limit{kAnswerTimeout_s, 0};
  ::setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  ::setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

bool peer_credentials(int connection, ucred& credentials) {
  socklen_t length = sizeof(credentials);
  return ::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0;
}

Fd pidfd_of(int connection, pid_t pid) {
#ifdef SO_PEERPIDFD
  int pidfd = -1;
  socklen_t length = sizeof(pidfd);
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) return Fd(pidfd);
#endif
  (void)connection;
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// Room for one descriptor in a control message.
union ControlBuffer {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr align;
};

void send_descriptor(int connection, int fd) {
  char status = 1;
  iovec data{&status, 1};
  ControlBuffer buffer{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = buffer.bytes;
  message.msg_controllen = sizeof(buffer.bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  ::sendmsg(connection, &message, MSG_NOSIGNAL);
}

Fd receive_descriptor(int connection) {
  char status = 0;
  iovec data{&status, 1};
  ControlBuffer buffer{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = buffer.bytes;
  message.msg_controllen = sizeof(buffer.bytes);
  if (::recvmsg(connection, &message, MSG_CMSG_CLOEXEC) <= 0) return Fd();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return Fd();
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return Fd(fd);
}

void hold_life_mutex(ArenaControl* control) {
  pthread_mutexattr_t attributes;
  ::pthread_mutexattr_init(&attributes);
  ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&control->life, &attributes);
  ::pthread_mutexattr_destroy(&attributes);
  ::pthread_mutex_lock(&control->life);
}

}  // namespace

Endpoint& Endpoint::instance() {
  static Endpoint* endpoint = new Endpoint();  // leaked: its thread runs until the process ends
  return *endpoint;
}

Endpoint::Endpoint() : control_(Arena::instance().control()) {
  const Token name = make_token();
  address_ = "pydist-";
  for (const uint8_t byte : name) {
    address_ += "0123456789abcdef"[byte >> 4];
    address_ += "0123456789abcdef"[byte & 15];
  }
  listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  PYDIST_CHECK_SYSTEM(listener_.get(), "cannot make a Unix socket");
  const Address address = abstract_address(address_);
  PYDIST_CHECK_SYSTEM(
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length),
      "cannot bind a Unix socket");
  PYDIST_CHECK_SYSTEM(::listen(listener_.get(), SOMAXCONN), "cannot listen on a Unix socket");
  offer(Arena::instance().token(), Arena::instance().fd());

  // A child must not keep the socket alive after this process: peers would connect and wait in
  // vain.
  listener_fd.store(listener_.get());
  ::pthread_atfork(nullptr, nullptr, [] {
    const int fd = listener_fd.exchange(-1);  // once: a grandchild may have another file there
    if (fd >= 0) ::close(fd);
  });

  sigset_t all;
  sigset_t previous;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &previous);  // the thread inherits this mask
  const int error = ::pthread_create(&thread_, nullptr, run, this);
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  PYDIST_CHECK(error == 0, ResourceError, "cannot start a thread: ", std::strerror(error));
  ::pthread_detach(thread_);
  // Peers take a free life mutex for a dead process, so nobody may hear of us before it is held.
  for (;;) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (started_) break;
    ::sched_yield();
  }
}

void* Endpoint::run(void* self) {
  static_cast<Endpoint*>(self)->serve();
  return nullptr;
}

void Endpoint::serve() {
  hold_life_mutex(control_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    started_ = true;
  }
  for (;;) {
    const Fd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.valid()) {
      answer(connection.get());
    } else if (errno != EINTR && errno != ECONNABORTED) {
      ::poll(nullptr, 0, 100);  // out of descriptors, say: do not spin, and never die
    }
  }
}

void Endpoint::answer(int connection) {
  limit_wait(connection);
  ucred credentials{};
  Token token{};
  if (!peer_credentials(connection, credentials)) return;
  if (credentials.uid != ::geteuid() && credentials.uid != 0) return;
  if (::recv(connection, token.data(), token.size(), MSG_WAITALL) !=
      static_cast<ssize_t>(token.size())) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = offers_.find(token);
  if (found != offers_.end()) send_descriptor(connection, found->second.get());
}

void Endpoint::offer(const Token& token, int fd) {
  Fd duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  PYDIST_CHECK_SYSTEM(duplicate.get(), "cannot duplicate a descriptor (raise `ulimit -n`)");
  const std::lock_guard<std::mutex> lock(mutex_);
  offers_[token] = std::move(duplicate);
}

void Endpoint::withdraw(const Token& token) noexcept {
  if (in_forked_child()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  offers_.erase(token);
}

Endpoint::Fetched Endpoint::fetch(const std::string& address, const Token& token, uint32_t uid) {
  const Fd connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  PYDIST_CHECK_SYSTEM(connection.get(), "cannot make a Unix socket (raise `ulimit -n`)");
  limit_wait(connection.get());
  const Address target = abstract_address(address);
  PYDIST_CHECK_SYSTEM(::connect(connection.get(),
                                reinterpret_cast<const sockaddr*>(&target.storage), target.length),
                      "its endpoint cannot be reached (another host or network namespace?)");
  ucred credentials{};
  PYDIST_CHECK(peer_credentials(connection.get(), credentials) && credentials.uid == uid,
               ResourceError, "its endpoint belongs to user ", credentials.uid, ", not to ", uid);
  PYDIST_CHECK_SYSTEM(::send(connection.get(), token.data(), token.size(), MSG_NOSIGNAL),
                      "its endpoint hung up");
  Fetched fetched;
  fetched.fd = receive_descriptor(connection.get());
  PYDIST_CHECK(fetched.fd.valid(), ResourceError, "its endpoint gave no descriptor (does user ",
               ::geteuid(), " run all ranks, and are descriptors left under `ulimit -n`?)");
  fetched.pidfd = pidfd_of(connection.get(), credentials.pid);
  return fetched;
}

}  // namespace pydist
