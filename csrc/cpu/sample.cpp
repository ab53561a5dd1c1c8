// Sampling: from the logits of a batch to tokens and logprobs. Nothing is sorted but what is listed.
//
// A row is cut into chunks, whatever the threads and the rows beside it, and what is found in them is merged in ascending
// order. Four rounds, each shared out among the threads, the second and third by (row, chunk), and each over those rows
// only that need it:
//
//   change: copies with penalties, bias, bans │ scan: best, NaN, maxima │ sum: weights, exponentials │ finish: token, list

#include <math.h>

#include "kernels.hpp"
#include "levels.hpp"
#include "sample.hpp"
#include "sample_passes.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kChunk = 8192;
// Top-p looks among about so many most likely tokens first.
constexpr int64_t kFirstLook = 256;

OCTAVO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Logits that are scanned.
struct Source {
  const float* logits;
  float* maxima;  // null: not wanted
  float best;
  bool nan;
};

// The rows of one call, and what is found about them.
struct Batch {
  explicit Batch(const Sample& asked)
      : call(asked),
        chunks((asked.vocabulary + kChunk - 1) / kChunk),
        num_maxima((asked.vocabulary + kGroup - 1) / kGroup * kLanes),
        sources(asked.rows + asked.changes.count),
        raw(asked.rows),
        weights(asked.rows * chunks),
        exponentials(asked.rows * chunks) {}

  // A source for what each row is sampled from; behind them, of changed rows that list logprobs, the raw logits.
  const Sample& call;
  const int64_t chunks, num_maxima;
  Buffer<Source> sources;
  int64_t num_sources = 0;
  Buffer<int64_t> raw;                   // [rows]: the source that logprobs are of
  Buffer<double> weights, exponentials;  // [rows, chunks]: sums

  bool draws(int64_t row) const { return !call.score && call.temperature[row] > 0.0; }
  int64_t top_k(int64_t row) const {
    const int64_t k = call.top_k[row];
    return k <= 0 ? call.vocabulary : smaller(k, call.vocabulary);
  }
  bool filters(int64_t row) const {
    return draws(row) && (call.min_p[row] > 0.0 || call.top_p[row] < 1.0 || top_k(row) < call.vocabulary);
  }
  // Whether it takes the weight of the whole vocabulary to draw.
  bool weighs_all(int64_t row) const {
    return draws(row) && !(call.min_p[row] > 0.0) && top_k(row) == call.vocabulary;
  }
  bool lists(int64_t row) const {
    return call.logprobs.start != nullptr && call.logprobs.start[row + 1] > call.logprobs.start[row];
  }
  bool sound(int64_t row) const { return call.status[row] == Status::fine; }
  double per_temperature(int64_t row) const { return 1.0 / call.temperature[row]; }

  // Calls visit(first, size) for a chunk.
  template <typename Visit>
  auto in_chunk(int64_t chunk, const Visit& visit) const {
    return visit(chunk * kChunk, smaller(kChunk, call.vocabulary - chunk * kChunk));
  }
};

void change(Batch& batch) {
  const Sample& call = batch.call;
  const Changes& changes = call.changes;
  for (int64_t row = 0; row < call.rows; ++row) {
    batch.sources[row].logits = call.logits + row * call.stride;
    batch.raw[row] = row;
  }
  batch.num_sources = call.rows;
  for (int64_t index = 0; index < changes.count; ++index) {
    const int64_t row = changes.rows[index];
    if (!batch.lists(row)) continue;
    batch.raw[row] = batch.num_sources;
    batch.sources[batch.num_sources++].logits = batch.sources[row].logits;
  }
  pool().run(changes.count, [&](int64_t index) {
    Source& source = batch.sources[changes.rows[index]];
    // A NaN must not hide behind a change: such a row stays as it is, and fails.
    if (scan(source.logits, call.vocabulary, nullptr).nan) return;
    if (!changes.ready[index]) change_row(call, index);
    source.logits = changes.copies + index * call.vocabulary;
  });
}

void scan_all(Batch& batch) {
  Buffer<Scanned> pieces(batch.num_sources * batch.chunks);
  pool().run(batch.num_sources * batch.chunks, [&](int64_t piece) {
    const Source& source = batch.sources[piece / batch.chunks];
    pieces[piece] = batch.in_chunk(piece % batch.chunks, [&](int64_t first, int64_t size) {
      return scan(source.logits + first, size, source.maxima == nullptr ? nullptr : source.maxima + first / kLanes);
    });
  });
  for (int64_t index = 0; index < batch.num_sources; ++index) {
    Source& source = batch.sources[index];
    source.best = kLowest;
    for (int64_t piece = index * batch.chunks; piece < (index + 1) * batch.chunks; ++piece) {
      source.nan |= pieces[piece].nan;
      source.best = pieces[piece].best > source.best ? pieces[piece].best : source.best;
    }
  }
  for (int64_t row = 0; row < batch.call.rows; ++row) {
    const Source& source = batch.sources[row];
    batch.call.status[row] = source.nan ? Status::nan : source.best == kLowest ? Status::empty : Status::fine;
  }
}

void sum_all(Batch& batch) {
  struct Sum {
    int64_t row;
    bool weights;
  };
  Buffer<Sum> sums(2 * batch.call.rows);
  int64_t count = 0;
  for (int64_t row = 0; row < batch.call.rows; ++row) {
    if (!batch.sound(row)) continue;
    if (batch.weighs_all(row)) sums[count++] = {row, true};
    if (batch.lists(row)) sums[count++] = {row, false};
  }
  pool().run(count * batch.chunks, [&](int64_t piece) {
    const Sum& sum = sums[piece / batch.chunks];
    const int64_t chunk = piece % batch.chunks, at = sum.row * batch.chunks + chunk;
    const Source& source = batch.sources[sum.weights ? sum.row : batch.raw[sum.row]];
    batch.in_chunk(chunk, [&](int64_t first, int64_t size) {
      if (sum.weights)
        batch.weights[at] = sum_weights(source.logits + first, size, source.best, batch.per_temperature(sum.row));
      else
        batch.exponentials[at] = sum_exponentials(source.logits + first, size, source.best);
    });
  });
}

double in_order(const double* values, int64_t count) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  return total;
}

// Tokens that a row may draw, ids ascending: whole vectors, behind the last -inf.
class Candidates {
 public:
  // Those that reach `bound`.
  Candidates(const Batch& batch, const Source& source, float bound)
      : bound_(bound),
        best_(source.best),
        most_(most_from(source.maxima, batch.num_maxima, bound)),
        logits_(most_),
        weights_(most_),
        ids_(most_) {
    visit_from(source.logits, source.maxima, batch.call.vocabulary, bound, [&](int64_t id, float logit) {
      logits_[count_] = logit;
      ids_[count_++] = id;
    });
    size_ = (count_ + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = count_; i < size_; ++i) logits_[i] = kLowest;
  }

  void weigh(double per_temperature) {
    for (int64_t i = 0; i < size_; i += 8) {
      const f64x8 weights = weights_of(logits_.data() + i, best_, per_temperature);
      std::memcpy(weights_.data() + i, &weights, sizeof weights);
    }
  }

  double weight() const { return in_order(weights_.data(), count_); }

  // Takes out those of less weight.
  void keep_from(double least) {
    for (int64_t i = 0; i < count_; ++i)
      if (weights_[i] < least) drop(i);
  }

  // Keeps `wanted`: the most likely, of equal ones those of lower ids.
  void keep(int64_t wanted) {
    if (wanted >= count_) return;
    const float bound = highest_bound(bound_, best_, [&](float at) {
      return count_from(logits_.data(), size_, at) >= wanted ? Verdict::low_enough : Verdict::too_high;
    });
    for (int64_t i = 0; i < count_; ++i) wanted -= logits_[i] > bound;
    keep_ties(bound, [&](int64_t) { return wanted-- > 0; });
  }

  // Keeps the fewest whose weight reaches `wanted`, in that order.
  void keep_weight(double wanted) {
    const auto weight_at = [&](float at) { return weight_from(logits_.data(), weights_.data(), size_, at); };
    const float bound = highest_bound(
        bound_, best_, [&](float at) { return weight_at(at) >= wanted ? Verdict::low_enough : Verdict::too_high; });
    double held = bound == best_ ? 0.0 : weight_at(of_key(int64_t{key_of(bound)} + 1));
    keep_ties(bound, [&](int64_t i) {
      const bool short_of_it = held < wanted;
      held += weights_[i];
      return short_of_it;
    });
  }

  // The first id at which the weights of it and all before it exceed this share of their total: none of weight zero.
  int64_t draw(double share) const {
    const double point = share * weight();
    double held = 0.0;
    for (int64_t i = 0; i < count_; ++i) {
      held += weights_[i];
      if (held > point) return ids_[i];
    }
    return ids_[0];  // not reached: a share of less than 1 of a total is less than the total
  }

 private:
  void drop(int64_t i) const {
    logits_[i] = kLowest;
    weights_[i] = 0.0;
  }

  // Takes out those below the bound, and of those at it the ones that are refused.
  template <typename Admit>
  void keep_ties(float bound, const Admit& admit) {
    for (int64_t i = 0; i < count_; ++i)
      if (logits_[i] < bound || (logits_[i] == bound && !admit(i))) drop(i);
  }

  float bound_, best_;
  int64_t most_, count_ = 0, size_ = 0;
  Buffer<float> logits_;
  Buffer<double> weights_;
  Buffer<int64_t> ids_;
};

// The token of a row with filters, among those that reach `bound`. -1: top-p needs more of them.
int64_t draw_among(const Batch& batch, int64_t row, float bound, double share) {
  const Sample& call = batch.call;
  const double min_p = call.min_p[row], top_p = call.top_p[row];
  Candidates some(batch, batch.sources[row], bound);
  some.weigh(batch.per_temperature(row));
  if (min_p > 0.0) some.keep_from(min_p);
  if (batch.top_k(row) < call.vocabulary) some.keep(batch.top_k(row));
  if (top_p < 1.0) {
    const bool all = batch.weighs_all(row);
    const double whole = all ? in_order(&batch.weights[row * batch.chunks], batch.chunks) : some.weight();
    if (all && bound > kLowest && some.weight() < whole * top_p) return -1;
    some.keep_weight(whole * top_p);
  }
  return some.draw(share);
}

int64_t draw_filtered(const Batch& batch, int64_t row, double share) {
  const Sample& call = batch.call;
  const Source& source = batch.sources[row];
  float bound = kLowest;
  if (batch.top_k(row) < call.vocabulary)
    bound = bound_of(source.maxima, batch.num_maxima, source.best, batch.top_k(row));
  if (call.min_p[row] > 0.0) {
    // (A little lower: a weight that rounds to min_p is kept, however near the best its logit is.)
    const float reached = bound_below(source.best, call.temperature[row] * (::log(call.min_p[row]) - 1e-6));
    bound = reached > bound ? reached : bound;
  }
  if (!batch.weighs_all(row)) return draw_among(batch, row, bound, share);
  const float first = bound_of(source.maxima, batch.num_maxima, source.best, kFirstLook);
  if (const int64_t token = draw_among(batch, row, first, share); token >= 0) return token;
  const double wanted = in_order(&batch.weights[row * batch.chunks], batch.chunks) * call.top_p[row];
  Buffer<float> room(batch.num_maxima * kLanes);
  bound = bound_of_weight(source.logits, call.vocabulary, source.best, call.temperature[row], wanted, room.data());
  if (const int64_t token = draw_among(batch, row, bound, share); token >= 0) return token;
  return draw_among(batch, row, kLowest, share);
}

// The same for a row without filters: the chunk first, then the token.
int64_t draw_plain(const Batch& batch, int64_t row, double share) {
  const Source& source = batch.sources[row];
  const double* sums = &batch.weights[row * batch.chunks];
  const double point = share * in_order(sums, batch.chunks);
  double held = 0.0;
  int64_t chunk = 0;
  while (chunk + 1 < batch.chunks && held + sums[chunk] <= point) held += sums[chunk++];
  return batch.in_chunk(chunk, [&](int64_t first, int64_t size) {
    int64_t last = -1, found = -1;
    by_sixteens(source.logits + first, size, [&](int64_t i, const float* sixteen) {
      if (found >= 0) return;
      for (int half = 0; half < 16; half += 8) {
        const f64x8 weights = weights_of(sixteen + half, source.best, batch.per_temperature(row));
        for (int lane = 0; lane < 8 && found < 0; ++lane) {
          held += weights[lane];
          // The sum of a chunk is rounded in another order: should the point lie behind its end, it is the last token.
          if (weights[lane] > 0.0) last = first + i + half + lane;
          if (held > point) found = last;
        }
      }
    });
    return found >= 0 ? found : last;
  });
}

int64_t choose(const Batch& batch, int64_t row) {
  const Sample& call = batch.call;
  const Source& source = batch.sources[row];
  if (!batch.draws(row)) return find(source.logits, call.vocabulary, source.best);
  const double share = uniform(call.seed[row], call.choice_index[row], call.position[row]);
  return batch.filters(row) ? draw_filtered(batch, row, share) : draw_plain(batch, row, share);
}

// Fills in the ids after the first, and the rank of the first.
void list_top(const Batch& batch, const Source& source, int64_t* ids, int64_t wanted, int64_t* rank) {
  if (wanted > 0) {
    const float bound = bound_of(source.maxima, batch.num_maxima, source.best, wanted);
    Buffer<Likely> likely(most_from(source.maxima, batch.num_maxima, bound));
    int64_t count = 0;
    visit_from(source.logits, source.maxima, batch.call.vocabulary, bound, [&](int64_t id, float logit) {
      likely[count++] = {logit, static_cast<int32_t>(id)};
    });
    order_by_likelihood(likely.data(), count, wanted);
    for (int64_t i = 0; i < wanted; ++i) ids[1 + i] = likely[i].id;
  }
  for (int64_t i = 1; i <= wanted; ++i) {
    if (ids[i] != ids[0]) continue;
    *rank = i;
    return;
  }
  *rank = 1 + count_before(source.logits, batch.call.vocabulary, ids[0]);
}

void list(const Batch& batch, int64_t row) {
  const Logprobs& asked = batch.call.logprobs;
  const Source& source = batch.sources[batch.raw[row]];
  const int64_t start = asked.start[row], count = asked.start[row + 1] - start;
  int64_t* ids = asked.ids + start;
  ids[0] = batch.call.tokens[row];
  if (asked.named[row]) rank_all(source.logits, batch.call.vocabulary, ids, count, asked.ranks + start);
  else list_top(batch, source, ids, count - 1, asked.ranks + start);
  const double total = ::log(in_order(&batch.exponentials[row * batch.chunks], batch.chunks));
  for (int64_t i = 0; i < count; ++i) {
    const float logit = source.logits[ids[i]];
    const double below = logit == source.best ? 0.0 : static_cast<double>(logit) - source.best;
    asked.logprobs[start + i] = static_cast<float>(below - total);
  }
}

}  // namespace

void sample(const Sample& call) {
  Batch batch(call);
  change(batch);
  // Maxima of what is drawn from with filters, and of what is listed.
  const auto wanted = [&](int64_t source) {
    return source >= call.rows || batch.filters(source) || (batch.lists(source) && batch.raw[source] == source);
  };
  int64_t count = 0;
  for (int64_t source = 0; source < batch.num_sources; ++source) count += wanted(source);
  Buffer<float> maxima(count * batch.num_maxima);
  count = 0;
  for (int64_t source = 0; source < batch.num_sources; ++source)
    if (wanted(source)) batch.sources[source].maxima = &maxima[count++ * batch.num_maxima];
  scan_all(batch);
  sum_all(batch);
  pool().run(call.rows, [&](int64_t row) {
    if (!batch.sound(row)) return;
    if (!call.score) call.tokens[row] = choose(batch, row);
    if (batch.lists(row)) list(batch, row);
  });
}

}  // namespace octavo::OCTAVO_LEVEL
