// Bytes that say whose they are: a word of a block is a function of the block's number and the word's place in it.
#pragma once

#include <cstddef>
#include <cstdint>

inline std::uint64_t word_of(std::uint64_t number, std::size_t place) {
  return (number * 0x9E3779B97F4A7C15ULL) ^ (place * 0xC2B2AE3D27D4EB4FULL);
}

// Every `step`th word, and the last one.
inline void fill(std::uint64_t* words, std::size_t count, std::uint64_t number, std::size_t step) {
  for (std::size_t i = 0; i < count; i += step) words[i] = word_of(number, i);
  words[count - 1] = word_of(number, count - 1);
}

inline bool holds(const std::uint64_t* words, std::size_t count, std::uint64_t number, std::size_t step) {
  for (std::size_t i = 0; i < count; i += step) {
    if (words[i] != word_of(number, i) && i != count - 1) return false;
  }
  return words[count - 1] == word_of(number, count - 1);
}
