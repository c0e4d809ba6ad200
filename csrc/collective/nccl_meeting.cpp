#include "collective/nccl_meeting.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace pydist {

namespace {

constexpr int64_t kVote = int64_t{1} << 32;  // counts voters; those with yes are counted below it

struct ProcessState {
  char state = 'X';
  uint64_t start_time = 0;
};

// Of the process, from /proc; nothing where there is none of that id.
std::optional<ProcessState> state_of(int64_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t end_of_name = text.rfind(')');  // the name may hold anything
  if (end_of_name == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(end_of_name + 1));
  ProcessState found;
  fields >> found.state;
  std::string field;
  for (int i = 4; i < 22; ++i) fields >> field;
  fields >> found.start_time;
  return found;
}

// Two processes with the same one see each other's process ids.
std::string host_of_processes() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat space{};
  if (boot_id.empty() || ::stat("/proc/self/ns/pid", &space) != 0) return "";
  return concat(boot_id, ":", space.st_ino);
}

}  // namespace

NcclMeeting::NcclMeeting(std::unique_ptr<Store> store, int rank, int size,
                         std::vector<int> global_ranks)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      global_ranks_(std::move(global_ranks)),
      me_(this_process()),
      processes_(size) {
  processes_[rank] = me_;
}

NcclMeeting::Process NcclMeeting::this_process() {
  Process process;
  process.pid = ::getpid();
  if (const auto state = state_of(process.pid)) process.start_time = state->start_time;
  process.host = host_of_processes();
  return process;
}

void NcclMeeting::arrive() {
  store_->set(concat("process/", rank_), concat(me_.pid, " ", me_.start_time, " ", me_.host));
  store_->add("arrived", 1);
}

bool NcclMeeting::all_arrived() {
  if (!have_arrived_.load()) have_arrived_.store(store_->add("arrived", 0) >= size_);
  return have_arrived_.load();
}

std::string NcclMeeting::missing() {
  std::string names;
  for (int r = 0; r < size_; ++r) {
    if (store_->check(concat("process/", r))) continue;
    names += concat(names.empty() ? "" : ", ", describe(r));
  }
  return names;
}

void NcclMeeting::publish_id(const nccl::UniqueId& id) {
  store_->set("id", std::string(id.bytes, sizeof(id.bytes)));
}

std::optional<nccl::UniqueId> NcclMeeting::find_id() {
  if (!store_->check("id")) return std::nullopt;
  const std::string bytes = store_->get("id");
  nccl::UniqueId id{};
  std::memcpy(id.bytes, bytes.data(), std::min(bytes.size(), sizeof(id.bytes)));
  return id;
}

void NcclMeeting::tell(const NcclFailure& failure) {
  if (store_->check("failure")) return;
  store_->set("failure", static_cast<char>(failure.kind) + failure.text);
  store_->set("alarm", "failure");
}

void NcclMeeting::ask() {
  store_->set("asked", "yes");
  store_->set("alarm", "asked");
}

NcclMeeting::News NcclMeeting::news() {
  News news;
  if (!store_->check("alarm")) return news;
  news.is_asked = store_->check("asked");
  if (store_->check("failure")) {
    const std::string told = store_->get("failure");
    if (!told.empty()) {
      news.failure = NcclFailure{static_cast<NcclFailure::Kind>(told[0]), told.substr(1)};
    }
  }
  return news;
}

void NcclMeeting::give(const Sign& sign) { store_->set(concat("sign/", rank_), sign.encode()); }

std::optional<Sign> NcclMeeting::sign_of(int rank) {
  const std::string key = concat("sign/", rank);
  if (!store_->check(key)) return std::nullopt;
  return Sign::decode(store_->get(key));
}

void NcclMeeting::vote(uint64_t ballot, bool yes) {
  store_->add(concat("ballot/", ballot), kVote + (yes ? 1 : 0));
}

std::optional<bool> NcclMeeting::outcome(uint64_t ballot) {
  const int64_t votes = store_->add(concat("ballot/", ballot), 0);
  if (votes / kVote < size_) return std::nullopt;
  return votes % kVote == size_;
}

const NcclMeeting::Process* NcclMeeting::process_of(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<Process>& process = processes_[rank];
  if (!process && have_arrived_.load()) {
    const std::string key = concat("process/", rank);
    try {
      std::istringstream fields(store_->get(key));
      process.emplace();
      fields >> process->pid >> process->start_time >> process->host;
    } catch (const std::exception&) {  // the Store is gone: then without
      process.reset();
      return nullptr;
    }
  }
  return process ? &*process : nullptr;
}

std::string NcclMeeting::describe(int rank) {
  std::string details;
  if (!global_ranks_.empty() && global_ranks_[rank] != rank) {
    details = concat("global rank ", global_ranks_[rank]);
  }
  if (const Process* process = process_of(rank)) {
    details += concat(details.empty() ? "" : ", ", "pid ", process->pid);
  }
  return details.empty() ? concat("rank ", rank) : concat("rank ", rank, " (", details, ")");
}

bool NcclMeeting::has_ended(int rank) {
  const Process* process = process_of(rank);
  if (process == nullptr || process->host.empty() || process->host != me_.host) return false;
  const std::optional<ProcessState> now = state_of(process->pid);
  return !now || now->start_time != process->start_time || now->state == 'Z' || now->state == 'X';
}

}  // namespace pydist
