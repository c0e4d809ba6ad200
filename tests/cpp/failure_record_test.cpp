// A rank's failures in shared memory: whole texts whenever they are read, and each where it
// belongs.
#include "pipeline/failure_record.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "pipeline/arena_blocks.h"
#include "transport/arena.h"

namespace {

using namespace pydist;

Failure failure_of(uint64_t generation, uint64_t step, char letter) {
  return {generation, step, generation % 2 == 0, std::string(10 + generation % 90, letter)};
}

void test_a_failure_is_read_as_it_was_written() {
  const auto records = std::make_unique<FailureRecords>();
  CHECK(records->of(1).generation() == 0);
  for (uint64_t generation = 1; generation <= 20; ++generation) {
    records->of(generation).write(failure_of(generation, 3, 'a'));
    // The last ones are all there; those before have been overwritten by later ones.
    for (uint64_t past = 1; past <= generation; ++past) {
      const std::optional<Failure> found = records->of(past).read();
      CHECK(found);
      CHECK(found->generation == (past + 8 > generation ? past : found->generation));
      CHECK(found->generation >= past);
      CHECK(found->text == failure_of(found->generation, 3, 'a').text);
      CHECK(found->is_mismatch == (found->generation % 2 == 0));
      CHECK(found->step == 3);
      CHECK(found->ends(past, 3));
      CHECK(found->ends(past, 2) == (found->generation > past));
      CHECK(!found->ends(generation + 1, 3));
    }
  }
}

void test_a_text_that_is_too_long_is_cut() {
  const auto record = std::make_unique<FailureRecord>();
  record->write({1, 1, false, std::string(5000, 'x')});
  CHECK(record->read()->text == std::string(FailureRecord::kTextNbytes, 'x'));
}

void test_a_reader_never_sees_half_a_failure() {
  const auto record = std::make_unique<FailureRecord>();
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (uint64_t generation = 1; generation <= 20000; ++generation) {
      record->write(failure_of(generation, generation, static_cast<char>('a' + generation % 26)));
    }
    over = true;
  });
  uint64_t last = 0;
  do {
    const std::optional<Failure> found = record->read();
    if (!found || found->generation == 0) continue;
    CHECK(found->generation >= last);
    last = found->generation;
    const Failure expected = failure_of(last, last, static_cast<char>('a' + last % 26));
    CHECK(found->step == last);
    CHECK(found->text == expected.text);
    CHECK(found->is_mismatch == expected.is_mismatch);
  } while (!over);
  writer.join();
  CHECK(record->read()->generation == 20000);
}

void test_blocks_are_used_again_within_a_bound() {
  const size_t before = Arena::instance().used_nbytes();
  {
    ArenaBlocks blocks(100 << 10);
    const ArenaBlocks::Block first = blocks.take(50000);
    CHECK(first.data != nullptr);
    CHECK(first.nbytes >= 50000);
    CHECK(blocks.take(60000).data == nullptr);  // beyond the bound
    blocks.give_back(first);
    const ArenaBlocks::Block again = blocks.take(49000);
    CHECK(again.data == first.data);
    CHECK(blocks.nbytes() == first.nbytes);
    blocks.give_back(again);
    for (int step = 0; step < 20; ++step) blocks.end_step();
    CHECK(blocks.nbytes() == 0);
    CHECK(Arena::instance().used_nbytes() == before);
    blocks.give_back(blocks.take(100 << 10));
  }
  CHECK(Arena::instance().used_nbytes() == before);
}

}  // namespace

int main() {
  test_a_failure_is_read_as_it_was_written();
  test_a_text_that_is_too_long_is_cut();
  test_a_reader_never_sees_half_a_failure();
  test_blocks_are_used_again_within_a_bound();
  return 0;
}
