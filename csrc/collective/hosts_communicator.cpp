#include "collective/hosts_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "collective/call_rules.h"
#include "collective/hosts_block.h"

namespace pydist {

namespace {

// A rank of this host that waits for another one of it gets the more telling error of those that
// wait for other hosts, where that comes at the same time.
double local_timeout_s(double timeout_s) { return 1.1 * timeout_s + 5; }

constexpr size_t kMaxRankText = 200;  // of one rank's part in a message about all of them

}  // namespace

HostsCommunicator::HostsCommunicator(HostsTeam team, std::unique_ptr<Store> store,
                                     std::unique_ptr<HostsMessages> messages, HostsOptions options)
    : team_(std::move(team)),
      options_(std::move(options)),
      blocks_(static_cast<size_t>(size()) * sizeof(HostsBlock)),
      messages_(std::move(messages)),
      watch_(std::move(store), team_.rank, size(),
             {[local = team_.local] {
                Board& board = local->board();
                return board.failed() ? board.failure() : std::string();
              },
              [local = team_.local](const std::string& reason) { local->board().fail(reason); }}),
      queue_(std::make_unique<OperationQueue>(
          std::shared_ptr<Board>(team_.local, &team_.local->board()))) {
  set_timeout_s(options_.timeout_s);
}

HostsCommunicator::~HostsCommunicator() {
  queue_.reset();
  if (board().failed()) leave_network();
}

void HostsCommunicator::set_timeout_s(double timeout_s) {
  options_.timeout_s = timeout_s;
  team_.timeout_s = timeout_s;
  team_.local->set_timeout_s(local_timeout_s(timeout_s));
}

void HostsCommunicator::run(const Collective& collective) {
  board().check_process();
  queue_->run([&] { execute(collective); });
}

std::shared_ptr<Request> HostsCommunicator::start(Collective collective,
                                                  std::shared_ptr<void> keep_alive) {
  std::string description = call_of(collective).describe();
  return queue_->start([this, collective = std::move(collective),
                        keep_alive = std::move(keep_alive)] { execute(collective); },
                       std::move(description));
}

// What the meeting finds wrong is known to all ranks, and nothing is under way then. Later errors
// end the group.
void HostsCommunicator::execute(const Collective& collective) {
  const Describe operation = [&] { return call_of(collective).describe(); };
  board().check(operation);
  ++sequence_;
  watch_.begin();
  try {
    meet(collective, operation);
  } catch (const MismatchError&) {
    watch_.end();
    throw;
  } catch (const UsageError&) {
    watch_.end();
    throw;
  } catch (...) {
    raise_failure(operation);
  }
  try {
    transfer(collective, operation);
  } catch (...) {
    raise_failure(operation);
  }
  counters_.add(collective);
  watch_.end();
}

void HostsCommunicator::meet(const Collective& collective, const Describe& operation) {
  const std::string why = why_refused(collective);
  if (collective.agreed && why.empty() && !HostsBlock::holds(collective)) return;
  const HostsBlock mine = HostsBlock::of(collective, why);
  team_.gather_all(&mine, sizeof(mine), blocks_.data(), operation);
  if (collective.operation == Operation::kInvalid) throw UsageError(why);
  PYDIST_CHECK(why.empty(), UsageError, operation(), ": ", why);
  for (int r = 0; r < size(); ++r) {
    if (!block(r).agrees_with(mine)) raise_mismatch();
  }
  if (collective.operation == Operation::kAllToAll) check_splits(collective, operation);
}

std::string HostsCommunicator::why_refused(const Collective& collective) const {
  const std::string why = why_invalid(collective, rank(), size());
  if (!why.empty() || team_.flat != nullptr) return why;
  switch (collective.operation) {
    case Operation::kReduceScatter:
    case Operation::kAllToAll:
    case Operation::kGather:
    case Operation::kScatter:
      return concat(name(), " reduces, gathers and broadcasts only");
    default:
      return "";
  }
}

const HostsBlock& HostsCommunicator::block(int r) const {
  return *reinterpret_cast<const HostsBlock*>(blocks_.data() +
                                              static_cast<size_t>(r) * sizeof(HostsBlock));
}

void HostsCommunicator::raise_mismatch() const {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    text +=
        concat(r > 0 ? "; " : "", describe(r), " ", block(r).describe().substr(0, kMaxRankText));
  }
  throw MismatchError(concat("ranks disagree about collective number ", sequence_, " of ", name(),
                             ": ", text, ". This is rank ", rank(),
                             ". Make every rank call the same operations in the same order, with "
                             "the same sizes and dtypes"));
}

// -- messages ------------------------------------------------------------------------------------

HostsMessages& HostsCommunicator::messages(const Buffer& buffer, int64_t tag, const char* verb,
                                           int peer) {
  board().check([&] { return describe_message(buffer, tag, verb, peer); });
  const bool any = peer == kAnySource && std::strcmp(verb, "recv") == 0;
  PYDIST_CHECK(any || (peer >= 0 && peer < size() && peer != rank()), UsageError, verb, " on rank ",
               rank(), " with rank ", peer, " of ", size(),
               "; the peer must be another rank of the group");
  PYDIST_CHECK(messages_ != nullptr, UsageError, name(), " has no messages");
  return *messages_;
}

std::string HostsCommunicator::describe_message(const Buffer& buffer, int64_t tag, const char* verb,
                                                int peer) const {
  const std::string whom = peer == kAnySource ? std::string("any rank") : describe(peer);
  return concat(verb, " of ", buffer.num_elements, " ", dtype_name(buffer.dtype), " with tag ", tag,
                ", peer ", whom);
}

void HostsCommunicator::send(const Buffer& buffer, int destination, int64_t tag) {
  messages(buffer, tag, "send", destination).send(buffer, destination, tag);
  if (tag >= 0) message_counters_->sent.add(buffer.nbytes());
}

std::shared_ptr<Request> HostsCommunicator::start_send(const Buffer& buffer, int destination,
                                                       int64_t tag, std::shared_ptr<void>) {
  send(buffer, destination, tag);  // which copies it
  auto request = make_request(describe_message(buffer, tag, "send", destination));
  request->finish(nullptr);
  return request;
}

std::shared_ptr<Request> HostsCommunicator::start_receive(const Buffer& buffer, int source,
                                                          int64_t tag,
                                                          std::shared_ptr<void> keep_alive) {
  HostsMessages& carrier = messages(buffer, tag, "recv", source);
  auto request = make_request(describe_message(buffer, tag, "recv", source));
  if (tag >= 0) {
    request->on_end([counters = message_counters_, nbytes = buffer.nbytes(), it = request.get()] {
      if (!it->error()) counters->received.add(nbytes);
    });
  }
  carrier.receive(buffer, source, tag, std::move(keep_alive), request);
  return request;
}

int HostsCommunicator::receive(const Buffer& buffer, int source, int64_t tag) {
  const auto request = start_receive(buffer, source, tag, nullptr);
  try {
    request->wait(options_.timeout_s);
  } catch (const TimeoutError&) {
    if (request->test()) throw;
    const std::string text =
        concat(describe(rank()), " waited ", options_.timeout_s, " s in ", request->description());
    fail(text);
    throw TimeoutError(text + "; is that rank still running, and does it send with this tag?");
  }
  return request->source();
}

CommunicatorCounts HostsCommunicator::counts() const {
  CommunicatorCounts counts;
  counters_.read(counts);
  counts.sent = message_counters_->sent.read();
  counts.received = message_counters_->received.read();
  return counts;
}

std::shared_ptr<Request> HostsCommunicator::make_request(std::string description) const {
  return std::make_shared<Request>(std::shared_ptr<Board>(team_.local, &team_.local->board()),
                                   std::move(description));
}

}  // namespace pydist
