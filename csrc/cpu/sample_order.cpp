// What sampling needs beside passes over the vocabulary: the random number of a row, the order of likely tokens, ranks.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "sample.hpp"

namespace octavo {
namespace {

bool comes_first(const Likely& a, const Likely& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

}  // namespace

double uniform(int64_t seed, int64_t choice_index, int64_t position) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  uint32_t word0 = static_cast<uint32_t>(position), word1 = static_cast<uint32_t>(choice_index), word2 = 0, word3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{word0} * 0xD2511F53u, product2 = uint64_t{word2} * 0xCD9E8D57u;
    word0 = static_cast<uint32_t>(product2 >> 32) ^ word1 ^ key0;
    word1 = static_cast<uint32_t>(product2);
    word2 = static_cast<uint32_t>(product0 >> 32) ^ word3 ^ key1;
    word3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return std::ldexp(static_cast<double>(uint64_t{word0} << 21 | word1 >> 11), -53);
}

void order_by_likelihood(Likely* tokens, int64_t count, int64_t wanted) {
  if (wanted < count) std::nth_element(tokens, tokens + wanted, tokens + count, comes_first);
  std::sort(tokens, tokens + std::min(wanted, count), comes_first);
}

void rank_all(const float* logits, int64_t vocabulary, const int64_t* ids, int64_t count, int64_t* ranks) {
  const auto token = [&](int64_t id) { return Likely{logits[id], static_cast<int32_t>(id)}; };
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return comes_first(token(ids[a]), token(ids[b])); });
  std::vector<Likely> named;
  for (int64_t index : order) named.push_back(token(ids[index]));
  // before[i]: tokens that come before the i-th of the named ones, but not before the one ahead of it.
  std::vector<int64_t> before(named.size() + 1);
  for (int64_t id = 0; id < vocabulary; ++id)
    ++before[static_cast<size_t>(std::upper_bound(named.begin(), named.end(), token(id), comes_first) - named.begin())];
  int64_t ahead = 0;
  for (size_t i = 0; i < named.size(); ++i) {
    ahead += before[i];
    ranks[order[i]] = ahead + 1;
  }
}

}  // namespace octavo
