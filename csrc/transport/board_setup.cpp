// How the ranks of a board meet: cards through the Store, arenas and the board through endpoints.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "base/check.h"
#include "base/clock.h"
#include "base/interrupt.h"
#include "transport/board.h"
#include "transport/endpoint.h"

namespace pydist {

namespace {

constexpr char kErrorMark = '!';

std::string name_of(const BoardOptions& options, int r) {
  return options.names.empty() ? concat("rank ", r) : options.names[r];
}

// Waits for a key of one rank, so that a rank that never comes is named.
std::string await_key(Store& store, const std::string& key, int r, const BoardOptions& options,
                      double deadline_s) {
  double pause_s = 100e-6;
  while (!store.check(key)) {
    check_interrupt();
    PYDIST_CHECK(monotonic_s() < deadline_s, TimeoutError, name_of(options, options.rank),
                 " waited ", options.timeout_s, " s for ", name_of(options, r), " to join ",
                 options.name, "; is it running, and does it make the same calls?");
    ::usleep(static_cast<useconds_t>(pause_s * 1e6));
    pause_s = std::min(2 * pause_s, 20e-3);
  }
  return store.get(key);
}

// Publishes what `produce` returns, or its error, so that peers raise as well instead of waiting.
template <class Produce>
auto publish_or_tell(Store& store, const std::string& key, Produce&& produce) {
  try {
    return produce();
  } catch (const std::exception& error) {
    store.set(key, kErrorMark + std::string(error.what()));
    throw;
  }
}

void raise_peers_error(const std::string& value, int r, const BoardOptions& options) {
  PYDIST_CHECK(value.empty() || value[0] != kErrorMark, PeerError, name_of(options, r),
               " failed in the set-up of ", options.name, ": ", value.substr(1));
}

std::vector<ProcessCard> exchange_cards(Store& store, const BoardOptions& options,
                                        double deadline_s) {
  const std::string mine = concat("card/", options.rank);
  publish_or_tell(store, mine, [&] {
    store.set(mine, ProcessCard::mine().serialize());
    return 0;
  });
  std::vector<ProcessCard> cards;
  for (int r = 0; r < options.size; ++r) {
    const std::string value = await_key(store, concat("card/", r), r, options, deadline_s);
    raise_peers_error(value, r, options);
    cards.push_back(ProcessCard::parse(value));
  }
  return cards;
}

// Maps every peer's arena; all ranks learn whether all could.
std::vector<std::shared_ptr<Peer>> connect_all(Store& store, const BoardOptions& options,
                                               const std::vector<ProcessCard>& cards,
                                               double deadline_s) {
  std::vector<std::shared_ptr<Peer>> peers;
  std::string verdict = "ok";
  try {
    for (const ProcessCard& card : cards) peers.push_back(Peer::connect(card));
  } catch (const Error& error) {
    verdict = concat(name_of(options, options.rank), " cannot share memory with ",
                     name_of(options, static_cast<int>(peers.size())), ": ", error.what());
  }
  store.set(concat("verdict/", options.rank), verdict);
  for (int r = 0; r < options.size; ++r) {
    const std::string theirs = await_key(store, concat("verdict/", r), r, options, deadline_s);
    PYDIST_CHECK(theirs == "ok", HostError, theirs);
  }
  return peers;
}

// Boards that rank 0 of some group made in this process. Ranks that are threads of one process use
// one mapping, so that ThreadSanitizer sees their flags as what they are: the same memory.
class OwnBoards {
 public:
  static void add(const Token& token, const std::shared_ptr<Mapping>& mapping) {
    const std::lock_guard<std::mutex> lock(mutex());
    boards()[token] = mapping;
  }
  static void remove(const Token& token) {
    const std::lock_guard<std::mutex> lock(mutex());
    boards().erase(token);
  }
  // Null where another process made it.
  static std::shared_ptr<Mapping> find(const Token& token) {
    const std::lock_guard<std::mutex> lock(mutex());
    const auto found = boards().find(token);
    return found == boards().end() ? nullptr : found->second;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::map<Token, std::shared_ptr<Mapping>>& boards() {
    static auto* instance = new std::map<Token, std::shared_ptr<Mapping>>();
    return *instance;
  }
};

Token parse_token(const std::string& text) {
  Token token{};
  PYDIST_CHECK(text.size() == token.size(), ResourceError, "a board's token has ", text.size(),
               " bytes");
  std::copy(text.begin(), text.end(), token.begin());
  return token;
}

}  // namespace

// Rank 0 makes the memory and offers it until everybody has it.
void Board::make(Store& store) {
  const Token token = make_token();
  publish_or_tell(store, "board", [&] {
    const Fd memory = make_memfd("pydist-board", mapped_nbytes());
    charge_memory(memory, 0, mapped_nbytes());
    use(std::make_shared<Mapping>(memory.get(), mapped_nbytes(), ForkBehavior::kHide));
    Endpoint::instance().offer(token, memory.get());
    return 0;
  });
  OwnBoards::add(token, mapping_);
  const std::shared_ptr<void> withdraw(nullptr, [&](void*) {
    OwnBoards::remove(token);
    Endpoint::instance().withdraw(token);
  });
  store.set("board", std::string(token.begin(), token.end()));
  arrive();
}

void Board::join(Store& store, const ProcessCard& maker, double deadline_s) {
  const std::string value = await_key(store, "board", 0, options_, deadline_s);
  if (value.size() != sizeof(Token)) raise_peers_error(value, 0, options_);
  const Token token = parse_token(value);
  std::shared_ptr<Mapping> mapping = OwnBoards::find(token);
  if (mapping == nullptr) {
    const Endpoint::Fetched fetched = Endpoint::fetch(maker.endpoint, token, maker.uid);
    mapping = std::make_shared<Mapping>(fetched.fd.get(), mapped_nbytes(), ForkBehavior::kHide);
  }
  use(std::move(mapping));
  arrive();
}

std::shared_ptr<Board> Board::create(Store& store, const BoardOptions& options) {
  const double deadline_s = monotonic_s() + options.timeout_s;
  const std::vector<ProcessCard> cards = exchange_cards(store, options, deadline_s);
  std::vector<std::shared_ptr<Peer>> peers = connect_all(store, options, cards, deadline_s);
  uint8_t isa = cards[0].isa;
  for (const ProcessCard& card : cards) isa = std::min(isa, card.isa);
  std::shared_ptr<Board> board(new Board(options, std::move(peers), static_cast<Isa>(isa)));
  if (options.rank == 0) {
    board->make(store);
  } else {
    board->join(store, cards[0], deadline_s);
  }
  return board;
}

}  // namespace pydist
