// What a link has described once is a number from then on: the sender's side and the receiver's.
//
// Both keep the same numbered texts, since a link delivers in order. A text is written as
//
//   | length << 2 | kNew    | number | text |   remember it under this number
//   |               kKnown  | number |          the one remembered
//   | length << 2 | kOnce   | text   |          not worth remembering
//
// When the numbers are used up both start over. Pure.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/check.h"

namespace pydist {

namespace description {

constexpr uint32_t kNew = 0, kKnown = 1, kOnce = 2;
constexpr uint32_t kMaxTexts = 256;

}  // namespace description

class DescriptionWriter {
 public:
  // Appends to `bytes`.
  void put(std::string_view text, std::string& bytes) {
    const auto known = numbers_.find(std::string(text));
    if (known != numbers_.end()) {
      put_word(known->second << 2 | description::kKnown, bytes);
      return;
    }
    if (numbers_.size() == description::kMaxTexts) numbers_.clear();
    const auto number = static_cast<uint32_t>(numbers_.size());
    numbers_.emplace(text, number);
    ++num_described_;
    put_word(static_cast<uint32_t>(text.size()) << 2 | description::kNew, bytes);
    put_word(number, bytes);
    bytes.append(text);
  }
  void put_once(std::string_view text, std::string& bytes) {
    put_word(static_cast<uint32_t>(text.size()) << 2 | description::kOnce, bytes);
    bytes.append(text);
  }
  // Texts that were written to be remembered.
  uint64_t num_described() const { return num_described_; }

 private:
  static void put_word(uint32_t word, std::string& bytes) {
    bytes.append(reinterpret_cast<const char*>(&word), sizeof(word));
  }

  std::unordered_map<std::string, uint32_t> numbers_;
  uint64_t num_described_ = 0;
};

class DescriptionReader {
 public:
  // Takes one text from the front of `bytes`. What is known stays valid until the next call.
  std::string_view take(std::string_view& bytes) {
    const uint32_t word = take_word(bytes);
    const uint32_t value = word >> 2;
    if ((word & 3) == description::kKnown) {
      PYDIST_CHECK(value < texts_.size(), Error, "a peer refers to description ", value, " of ",
                   texts_.size());
      return texts_[value];
    }
    uint32_t number = 0;
    if ((word & 3) == description::kNew) number = take_word(bytes);
    PYDIST_CHECK(value <= bytes.size(), Error, "a peer's description is cut off");
    const std::string_view text = bytes.substr(0, value);
    bytes.remove_prefix(value);
    if ((word & 3) == description::kOnce) return text;
    PYDIST_CHECK(number < description::kMaxTexts, Error, "a peer describes text ", number);
    if (number >= texts_.size()) texts_.resize(number + 1);
    texts_[number] = text;
    return texts_[number];
  }

 private:
  static uint32_t take_word(std::string_view& bytes) {
    uint32_t word = 0;
    PYDIST_CHECK(bytes.size() >= sizeof(word), Error, "a peer's description is cut off");
    std::memcpy(&word, bytes.data(), sizeof(word));
    bytes.remove_prefix(sizeof(word));
    return word;
  }

  std::vector<std::string> texts_;
};

}  // namespace pydist
