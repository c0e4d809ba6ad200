#include "bucket/device_round.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "base/polling.h"

namespace pydist {

namespace {

constexpr useconds_t kSleep_us = 100;
constexpr size_t kAlignment = 512;  // of units within the buckets' memory

size_t aligned(size_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

void add_once(std::vector<Stream>& streams, Stream stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

std::string text_of(const Bitmap& bitmap) {
  const auto& words = bitmap.words();
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t));
}

Bitmap bitmap_of(const std::string& text, int size) {
  Bitmap bitmap(size);
  auto* words = reinterpret_cast<char*>(bitmap.words().data());
  text.copy(words, bitmap.words().size() * sizeof(uint64_t));
  return bitmap;
}

}  // namespace

DeviceRound::DeviceRound(std::shared_ptr<NcclCommunicator> communicator,
                         std::unique_ptr<DeviceAllReduce> all_reduce, std::unique_ptr<Store> store,
                         at::Device device, WireType wire, RoundOptions options)
    : communicator_(std::move(communicator)),
      all_reduce_(std::move(all_reduce)),
      store_(std::move(store)),
      device_(device),
      wire_(wire),
      options_(std::move(options)),
      records_(communicator_, options_.num_parameters),
      left_out_(static_cast<int>(options_.units.size())) {}

// A communication hook's units are not among the options.
DeviceRound::UnitState& DeviceRound::state(int unit) {
  const auto index = static_cast<size_t>(unit);
  while (states_.size() <= index) states_.push_back(std::make_unique<UnitState>());
  return *states_[index];
}

bool DeviceRound::is_capturing() const {
  return runtime().is_capturing(runtime().current_stream());
}

void* DeviceRound::unit_memory(int unit) { return hold_memory(unit).get(); }

std::shared_ptr<void> DeviceRound::hold_memory(int unit) {
  UnitState& made = state(unit);
  if (made.memory == nullptr) made.memory = allocate_alone(unit);
  return made.memory;
}

std::shared_ptr<void> DeviceRound::allocate_alone(int unit) const {
  const auto nbytes = static_cast<int64_t>(options_.units[unit].nbytes());
  const auto options = at::TensorOptions(at::kByte).device(device_);
  auto memory = std::make_shared<at::Tensor>(at::empty({nbytes}, options));
  return std::shared_ptr<void>(memory, memory->data_ptr());
}

// As one block: registering memory is dear. All ranks do it at the same time, in the same order.
void DeviceRound::allocate_buckets() {
  std::vector<std::pair<int, size_t>> offsets;
  size_t total_nbytes = 0;
  for (size_t u = 0; u < options_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    if (options_.units[u].alone || left_out_.test(unit) || state(unit).memory != nullptr) continue;
    offsets.emplace_back(unit, total_nbytes);
    total_nbytes += aligned(options_.units[u].nbytes());
  }
  if (total_nbytes == 0) return;
  const std::shared_ptr<void> memory = communicator_->allocate(total_nbytes);
  for (const auto& [unit, offset] : offsets) {
    state(unit).memory = std::shared_ptr<void>(memory, static_cast<char*>(memory.get()) + offset);
  }
  mark_delivery();  // the memory is zeroed on this stream
}

void DeviceRound::begin(int divisor) {
  communicator_->check();
  divisor_ = divisor > 0 ? divisor : size();
  next_ = 0;
  second_ = false;
  for (const auto& unit : states_) {
    unit->published = false;
    unit->sources.clear();
  }
}

void DeviceRound::begin_second(int divisor) {
  begin(divisor);
  second_ = true;
}

bool DeviceRound::leave_out(const Bitmap& units) {
  if (num_agreements_ > 0 && units == left_out_) return true;
  const DeviceGuard guard(communicator_->device());
  PYDIST_CHECK(!is_capturing(), UsageError,
               "a CUDA graph cannot capture the first backward of a model, nor the first one after "
               "parameters were frozen or unfrozen; run one before the capture");
  agree_on_left_out(units);
  left_out_ = units;
  allocate_buckets();
  return true;
}

void DeviceRound::agree_on_left_out(const Bitmap& units) {
  const std::string prefix = concat("frozen/", num_agreements_++, "/");
  store_->set(concat(prefix, rank()), text_of(units));
  for (int r = 0; r < size(); ++r) {
    const std::string key = concat(prefix, r);
    if (r != rank()) wait_for_peer(r, key);
    check_same(r, units, bitmap_of(store_->get(key), static_cast<int>(options_.units.size())));
  }
}

void DeviceRound::wait_for_peer(int peer, const std::string& key) {
  Polling polling(kSleep_us);
  while (!store_->check(key)) {
    if (!polling.pause()) continue;
    check_interrupt();
    communicator_->check();
    if (polling.waited_s() <= options_.timeout_s) continue;
    const std::string text = concat(
        describe(rank()), " waited ", options_.timeout_s, " s for ", describe(peer),
        ", to agree on which parameters are trainable, in a backward that ",
        num_agreements_ == 1 ? "is the first" : "comes after some were frozen or unfrozen here");
    communicator_->fail(text);
    throw TimeoutError(text + "; is every rank still running, and does it freeze the same ones?");
  }
  wait_s_ += polling.waited_s();
}

void DeviceRound::check_same(int peer, const Bitmap& mine, const Bitmap& theirs) const {
  if (mine == theirs) return;
  int unit = 0;
  while (mine.test(unit) == theirs.test(unit)) ++unit;
  const auto who = [&](bool frozen) { return describe(mine.test(unit) == frozen ? rank() : peer); };
  throw MismatchError(concat(options_.unit_names[unit], " is frozen on ", who(true),
                             ", but not on ", who(false),
                             "; freeze and unfreeze the same parameters on every rank"));
}

void DeviceRound::accumulated(int unit) {
  const DeviceGuard guard(communicator_->device());
  const Stream stream = runtime().current_stream();
  add_once(state(unit).sources, stream);
  add_once(seen_, stream);
  has_several_streams_ = has_several_streams_ || seen_.size() > 1;
}

void DeviceRound::open(int unit) {
  const DeviceGuard guard(communicator_->device());
  const Stream stream = runtime().current_stream();
  for (const Stream source : state(unit).sources) {
    if (source == stream) continue;
    crossing_.record(source);
    crossing_.block(stream);
  }
  state(unit).sources.assign(1, stream);
  add_once(seen_, stream);
  wait_for_delivery(stream);
}

// The units' memory may still be read by the last round's copies. Who captures a graph, or launches
// one, has ordered that with what came before.
void DeviceRound::wait_for_delivery(Stream stream) {
  if (!has_delivered_ || delivered_on_ == stream) return;
  if (!delivered_in_capture_ && !runtime().is_capturing(stream)) delivered_.block(stream);
}

void DeviceRound::copy(int unit, CopyDirection direction, const std::vector<PackItem>& items) {
  if (items.empty()) return;
  const DeviceGuard guard(communicator_->device());
  UnitState& to = state(unit);
  DevicePack& pack = direction == CopyDirection::kToUnit ? to.to_unit : to.from_unit;
  pack.run(items, {}, runtime().current_stream());
}

void DeviceRound::publish(int unit, void* data) {
  PYDIST_CHECK(
      !left_out_.test(unit), UsageError, options_.unit_names[unit],
      " got a gradient within no_sync() and was frozen before ranks averaged it; freeze it "
      "after the backward that does");
  const DeviceGuard guard(communicator_->device());
  UnitState& now = state(unit);
  add_once(now.sources, runtime().current_stream());
  add_once(seen_, runtime().current_stream());
  now.data = data;
  now.published = true;
  const int first = next_;
  const int num_units = static_cast<int>(options_.units.size());
  while (next_ < num_units && (state(next_).published || left_out_.test(next_))) ++next_;
  launch(first, next_);
}

void DeviceRound::launch_published() {
  const int num_units = static_cast<int>(options_.units.size());
  launch(std::exchange(next_, num_units), num_units);
}

// Those units in the range that are published.
void DeviceRound::launch(int begin, int end) {
  std::vector<Stream> sources;
  for (int u = begin; u < end; ++u) {
    if (!state(u).published) continue;
    for (const Stream stream : state(u).sources) add_once(sources, stream);
  }
  for (const Stream stream : sources) communicator_->after(stream);
  for (int u = begin; u < end; ++u) {
    if (!state(u).published) continue;
    const Unit& unit = options_.units[u];
    all_reduce_->mean(state(u).data, unit.num_elements, unit.dtype, wire_of(unit), divisor_,
                      options_.unit_names[u]);
    moved_nbytes_ += unit.nbytes();
  }
}

WireType DeviceRound::wire_of(const Unit& unit) const {
  switch (wire_) {
    case WireType::kFloat16:
      return unit.dtype == DType::kFloat16 ? wire_ : WireType::kSame;
    case WireType::kBFloat16:
      return unit.dtype == DType::kBFloat16 ? wire_ : WireType::kSame;
    default:
      return wire_;
  }
}

void DeviceRound::join() {
  add_once(seen_, runtime().current_stream());
  for (const Stream stream : seen_) communicator_->before(stream);
}

bool DeviceRound::end_unanswered(const RoundRecord& mine) {
  const DeviceGuard guard(communicator_->device());
  launch_published();
  if (!second_) records_.send(mine);
  // After the records too: a graph's launches, and its capture, come after all that was enqueued.
  join();
  return true;
}

const std::vector<RoundRecord>& DeviceRound::end(const RoundRecord& mine) {
  const DeviceGuard guard(communicator_->device());
  end_unanswered(mine);
  const double start_s = monotonic_s();
  const std::vector<RoundRecord>& records = records_.wait();
  wait_s_ += monotonic_s() - start_s;
  return records;
}

const std::vector<RoundRecord>* DeviceRound::late_records() {
  const DeviceGuard guard(communicator_->device());
  return is_capturing() ? nullptr : records_.poll();
}

bool DeviceRound::may_wait() const {
  const DeviceGuard guard(communicator_->device());
  return !is_capturing();
}

// What a gradient's memory is used for on this stream comes before what its own stream makes of it,
// once it is free.
void DeviceRound::delivered() {
  const DeviceGuard guard(communicator_->device());
  mark_delivery();
  for (const Stream stream : seen_) {
    if (stream != delivered_on_) delivered_.block(stream);
  }
  seen_.clear();
}

void DeviceRound::mark_delivery() {
  const Stream stream = runtime().current_stream();
  wait_for_delivery(stream);
  delivered_.record(stream);
  delivered_on_ = stream;
  has_delivered_ = true;
  delivered_in_capture_ = runtime().is_capturing(stream);
}

// Aborting lets the communicator's stream go on: what the others enqueue from now on comes later.
bool DeviceRound::drain() noexcept {
  try {
    const DeviceGuard guard(communicator_->device());
    add_once(seen_, runtime().current_stream());
    crossing_.record(communicator_->stream());
    for (const Stream stream : std::exchange(seen_, {})) crossing_.block(stream);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace pydist
