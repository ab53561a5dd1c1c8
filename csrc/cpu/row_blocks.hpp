// Rows shared out in blocks among threads that each go through several calls by themselves.
//
//   thread 0           │ thread 1                │ …
//   block 0 │ block 1  │ block 2    │ block 3    │
//
// A thread has as many rows as it was fast lately: cores differ, and what else runs on them changes. For all wait for the
// slowest; who is done takes a block that another has not begun.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace octavo {

// How fast each thread is, compared with the others. One recording's; used by one thread at a time.
class Paces {
 public:
  // Of the work, for each thread what it can do of it; together 1.
  const std::vector<double>& of(int64_t threads) {
    if (static_cast<int64_t>(shares_.size()) != threads)
      shares_.assign(static_cast<size_t>(threads), 1.0 / static_cast<double>(threads));
    return shares_;
  }

  // Rows a second of each thread in the same work; zero of one that did nothing says nothing.
  void learn(const std::vector<double>& speeds) {
    double all = 0;
    for (const double speed : speeds) all += speed;
    if (speeds.size() != shares_.size() || *std::min_element(speeds.begin(), speeds.end()) <= 0) return;
    const double fewest = kFewest / static_cast<double>(speeds.size());
    double sum = 0;
    for (size_t i = 0; i < speeds.size(); ++i) sum += shares_[i] = std::max(fewest, (shares_[i] + speeds[i] / all) / 2);
    for (double& share : shares_) share /= sum;
  }

 private:
  static constexpr double kFewest = 0.25;  // of an equal share: who has no work is never found to be faster

  std::vector<double> shares_;
};

class RowBlocks {
 public:
  // Whether it is worth it for so many rows: a thread that goes by itself reads all weights.
  static bool worth(int64_t rows, int64_t threads) { return threads > 1 && rows >= kFewestRows * threads; }

  RowBlocks(int64_t rows, const std::vector<double>& shares)
      : each_((rows + kMostRows * threads_of(shares) - 1) / (kMostRows * threads_of(shares))) {
    double before = 0;
    for (const double share : shares) {
      const int64_t first = multiple(static_cast<double>(rows) * before, rows);
      before += share;
      const int64_t own = multiple(static_cast<double>(rows) * before, rows) - first;
      for (int64_t i = 0; i < each_; ++i) begins_.push_back(first + multiple(static_cast<double>(own * i / each_), own));
    }
    begins_.push_back(rows);
  }

  // The first of them are the first thread's, and so on.
  int64_t count() const { return static_cast<int64_t>(begins_.size()) - 1; }
  int64_t begin(int64_t block) const { return begins_[static_cast<size_t>(block)]; }
  int64_t rows(int64_t block) const { return begin(block + 1) - begin(block); }

 private:
  // Of so many rows the values between two calls mostly stay in the second-level cache.
  static constexpr int64_t kMostRows = 512, kFewestRows = 128, kMultiple = 32;

  static int64_t threads_of(const std::vector<double>& shares) { return static_cast<int64_t>(shares.size()); }
  static int64_t multiple(double rows, int64_t most) {
    return std::min(most, static_cast<int64_t>(rows / kMultiple + 0.5) * kMultiple);
  }

  int64_t each_;
  std::vector<int64_t> begins_;
};

}  // namespace octavo
