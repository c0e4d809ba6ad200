#include "pipeline/process_group_channel.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

// Most messages of small models fit; a larger block would make the ends of steps dear.
constexpr size_t kBlockNbytes = 4 << 10;
constexpr size_t kAlignment = 64;     // of a payload behind its envelope
constexpr double kLook_s = 0.1;       // between looks at signals and at peers' failures
constexpr double kLastWords_s = 0.2;  // that a peer's failure may come after its connection broke

size_t payload_begin(const ImageHeader& header) {
  return (header.envelope_nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

ImageHeader header_of(const uint8_t* bytes) {
  ImageHeader header;
  std::memcpy(&header, bytes, sizeof(header));
  return header;
}

size_t run_nbytes(const uint8_t* block) {
  const ImageHeader header = header_of(block);
  return payload_begin(header) + header.payload_nbytes;
}

std::string failure_key(uint64_t generation) { return concat("failed/", generation); }

std::string serialize(const Failure& failure) {
  return concat(failure.step, " ", failure.is_mismatch ? 1 : 0, " ", failure.text);
}

Failure parse(uint64_t generation, const std::string& value) {
  Failure failure;
  failure.generation = generation;
  std::istringstream in(value);
  in >> failure.step >> failure.is_mismatch;
  in.get();
  std::getline(in, failure.text, '\0');
  return failure;
}

size_t block_nbytes(const ChannelOptions& options) {
  const size_t wanted = options.ring_nbytes == 0 ? kBlockNbytes : options.ring_nbytes;
  return std::max(wanted, sizeof(ImageHeader));
}

}  // namespace

ProcessGroupChannel::ProcessGroupChannel(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                         std::unique_ptr<Store> store,
                                         const ChannelOptions& options)
    : StepChannel(options.size), options_(options), store_(std::move(store)) {
  watch_forks();
  store_->set(concat("pid/", rank()), concat(::getpid()));
  for (int r = 0; r < size(); ++r) pids_.push_back(store_->get(concat("pid/", r)));
  streams_ = std::make_unique<ByteStreams>(std::move(group), block_nbytes(options), &run_nbytes);
}

ProcessGroupChannel::~ProcessGroupChannel() {
  if (in_forked_child()) (void)streams_.release();  // its threads are not there
}

std::string ProcessGroupChannel::describe(int rank) const {
  std::string text = concat("rank ", rank, " (");
  if (!options_.global_ranks.empty() && options_.global_ranks[rank] != rank) {
    text += concat("global rank ", options_.global_ranks[rank], ", ");
  }
  return concat(text, "pid ", pids_[rank], ")");
}

void ProcessGroupChannel::check() {
  PYDIST_CHECK(!in_forked_child(), UsageError, options_.name,
               " belongs to the process that forked this one");
  if (streams_->first_lost() != kNobody) raise_lost("the begin of a step");
}

// -- messages ------------------------------------------------------------------------------------

void ProcessGroupChannel::post(int destination, const Message& message, const Stamp& stamp) {
  write_envelope(message, stamp, scratch_);
  at::Tensor run = streams_->make_run(run_nbytes(scratch_.data()));
  auto* to = run.mutable_data_ptr<uint8_t>();
  std::memcpy(to, scratch_.data(), scratch_.size());
  write_payload(message, to + payload_begin(header_of(scratch_.data())));
  streams_->send(destination, std::move(run));
}

void ProcessGroupChannel::post_end_of_step(int destination, const Stamp& stamp) {
  write_end_of_step(stamp, scratch_);
  at::Tensor run = streams_->make_run(scratch_.size());
  std::memcpy(run.mutable_data_ptr<uint8_t>(), scratch_.data(), scratch_.size());
  streams_->send(destination, std::move(run));
}

int ProcessGroupChannel::hand_over() { return streams_->sending_to(); }

void ProcessGroupChannel::take_in() {
  for (const ByteStreams::Arrived& arrived : streams_->take()) {
    const auto* envelope = arrived.bytes.const_data_ptr<uint8_t>();
    const ImageHeader header = header_of(envelope);
    newest_generation_ = std::max(newest_generation_, header.generation);
    arrive(arrived.source, envelope, envelope + payload_begin(header));
  }
}

// -- waiting -------------------------------------------------------------------------------------

void ProcessGroupChannel::wait(const std::function<int()>& missing, const Describe& describe) {
  const double start_s = monotonic_s();
  double next_check_s = start_s + kLook_s;
  for (;;) {
    const uint64_t seen = streams_->num_events();
    const int peer = missing();
    if (peer == kNobody) return;
    if (!streams_->lost(peer).empty()) {
      // It may have said why before it left.
      const double deadline_s = monotonic_s() + kLastWords_s;
      while (monotonic_s() < deadline_s) {
        next_look_s_ = 0;
        if (missing() == kNobody) return;
        ::usleep(10000);
      }
      raise_lost(describe());
    }
    streams_->wait_for_event(seen, kLook_s);
    const double now_s = monotonic_s();
    if (now_s < next_check_s) continue;
    next_check_s = now_s + kLook_s;
    check_interrupt();
    if (now_s - start_s < options_.timeout_s || missing() == kNobody) continue;
    throw TimeoutError(concat(this->describe(rank()), " waited ", options_.timeout_s, " s for ",
                              this->describe(peer), " in ", describe(),
                              "; is that rank still running, and does it make the same calls? "
                              "(the limit is the timeout of the group, or PYDIST_TIMEOUT_S)"));
  }
}

void ProcessGroupChannel::raise_lost(const std::string& operation) {
  const int peer = streams_->first_lost();
  throw PeerError(concat(describe(peer), " died or left while ", describe(rank()), " waited in ",
                         operation, " (what did it print last?; the connection says: ",
                         streams_->lost(peer), "); ", options_.name,
                         " cannot be used any more: make it again on every rank, or restart the "
                         "job"));
}

// -- failures ------------------------------------------------------------------------------------

void ProcessGroupChannel::publish(const Failure& failure) noexcept {
  try {
    store_->set(failure_key(failure.generation), serialize(failure));
  } catch (const std::exception&) {
    // The store is gone together with the rank that kept it; peers learn from their broken
    // connections.
  }
}

std::optional<Failure> ProcessGroupChannel::find_failure(const Stamp& stamp, bool urgent) {
  const double now_s = monotonic_s();
  if (now_s < next_look_s_ && !urgent && newest_generation_ <= stamp.generation) {
    return std::nullopt;
  }
  next_look_s_ = now_s + kLook_s;
  try {
    if (!store_->check(failure_key(stamp.generation))) return std::nullopt;
    const Failure failure = parse(stamp.generation, store_->get(failure_key(stamp.generation)));
    if (failure.ends(stamp.generation, stamp.step)) return failure;
  } catch (const std::exception&) {
    // As in publish().
  }
  return std::nullopt;
}

}  // namespace pydist
