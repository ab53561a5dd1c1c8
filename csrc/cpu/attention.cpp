// Attention over the paged KV cache, for any mix of prompt chunks and single rows. The cache's layout is drawn at KVCache.
//
// A query vector (one row, one head) looks at positions of its own. They are cut into partitions of 256 positions, at
// multiples of 256; each is reduced from a fresh state, and the results are merged in ascending order. So the bits do not
// depend on chunks, on what was cached, on the rows beside it or on threads: a long context can be shared out among them.
//
//   vectors of one KV head ─┬─ tile (up to 16)  ─┬─ partition 0 ─ scores → softmax → weighted values ┐
//                           │                    ├─ partition 1 ─ …                                  ├─ merge
//                           └─ …                 └─ …                                                ┘

#include <algorithm>
#include <optional>

#include "attention_amx.hpp"
#include "attention_tile.hpp"
#include "attention_vectors.hpp"
#include "levels.hpp"
#include "scratch.hpp"
#include "shares.hpp"
#include "thread_pool.hpp"

namespace octavo::OCTAVO_LEVEL {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kProducts = 1 << 16;  // what is less is not worth a second thread

int64_t tiles_of_head(const Attention& call, int64_t request, int64_t tile) {
  const int64_t rows = call.query_start[request + 1] - call.query_start[request];
  return (rows * (call.query_heads / call.cache.heads) + tile - 1) / tile;
}

void list_tiles(const Attention& call, int64_t tile, Tile* tiles) {
  const int64_t shared = call.query_heads / call.cache.heads;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t vectors = (call.query_start[request + 1] - call.query_start[request]) * shared;
    for (int64_t first = 0; first < vectors; first += tile)
      for (int64_t head = 0; head < call.cache.heads; ++head)
        *tiles++ = {request, head, first, std::min(tile, vectors - first)};
  }
}

// What a thread works on, and what it most likely does next, so that this can be fetched.
template <typename Work>
class Tasks {
 public:
  Tasks(const Attention& call, Shares& shares)
      : call_(call), shares_(shares), self_(ThreadPool::self()), now_(shares.take(self_)) {}

  bool left() const { return now_ >= 0; }
  int64_t now() const { return now_; }
  int64_t after() const { return after_; }  // -1: nothing

  // tile_of(task): the tile of each.
  template <typename TileOf>
  const Work& begin(const TileOf& tile_of) {
    if (after_ != now_) works_[turn_].emplace(call_, tile_of(now_));
    after_ = shares_.next(self_);
    if (after_ >= 0) works_[1 - turn_].emplace(call_, tile_of(after_));
    return *works_[turn_];
  }
  const Work& next() const { return *works_[1 - turn_]; }

  void advance() {
    works_[turn_].reset();
    turn_ = 1 - turn_;
    now_ = shares_.take(self_);
  }

 private:
  const Attention& call_;
  Shares& shares_;
  const int64_t self_;
  int64_t now_, after_ = -1;
  std::optional<Work> works_[2];
  int turn_ = 0;
};

// Many tiles: each goes through its partitions by itself.
template <typename Work>
void whole_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count, int64_t threads) {
  Shares shares(count, threads);
  pool().run(threads, [&](int64_t) {
    const int64_t size = Work::sums_size(call, Work::kTile);
    float* sums = static_cast<float*>(scratch(2 * size * kFloat + Work::Room::bytes(call.cache)));
    typename Work::State part{{}, {}, sums}, whole{{}, {}, sums + size};
    typename Work::Room room(call.cache, sums + 2 * size);
    for (Tasks<Work> tasks(call, shares); tasks.left(); tasks.advance()) {
      const Work& work = tasks.begin([&](int64_t task) -> const Tile& { return tiles[task]; });
      Next<Work> after;
      if (tasks.after() >= 0) after = {&tasks.next(), tasks.next().first_partition()};
      const int64_t last = work.first_partition() + work.partitions() - 1;
      if (work.partitions() == 1) {
        work.reduce(last, part, room, after);
        work.finish(part);
        continue;
      }
      work.begin(whole);
      for (int64_t partition = work.first_partition(); partition <= last; ++partition) {
        work.reduce(partition, part, room, partition < last ? Next<Work>{&work, partition + 1} : after);
        work.merge(part, whole);
      }
      work.finish(whole);
    }
  });
}

struct Piece {
  int64_t tile, partition;
};

// Few tiles with long contexts: partitions are shared out, and merged when all are there.
template <typename Work>
void shared_tiles(const Attention& call, const Buffer<Tile>& tiles, int64_t count, int64_t num_pieces) {
  int64_t most = 0;
  for (int64_t index = 0; index < count; ++index) most = std::max(most, tiles[index].count);
  const int64_t size = Work::sums_size(call, most);
  const Buffer<Piece> pieces(num_pieces);
  const Buffer<typename Work::State> parts(num_pieces);
  const auto sums = Buffer<float>::of_anything((num_pieces + 1) * size);
  for (int64_t index = 0, next = 0; index < count; ++index) {
    const Work work(call, tiles[index]);
    for (int64_t p = 0; p < work.partitions(); ++p, ++next) {
      pieces[next] = {index, work.first_partition() + p};
      parts[next].sums = sums.data() + next * size;
    }
  }
  Shares shares(num_pieces, pool().size());
  pool().run(pool().size(), [&](int64_t) {
    typename Work::Room room(call.cache, scratch(Work::Room::bytes(call.cache)));
    for (Tasks<Work> tasks(call, shares); tasks.left(); tasks.advance()) {
      const Work& work = tasks.begin([&](int64_t task) -> const Tile& { return tiles[pieces[task].tile]; });
      Next<Work> after;
      if (tasks.after() >= 0) after = {&tasks.next(), pieces[tasks.after()].partition};
      work.reduce(pieces[tasks.now()].partition, parts[tasks.now()], room, after);
    }
  });
  typename Work::State whole{{}, {}, sums.data() + num_pieces * size};
  for (int64_t index = 0, piece = 0; index < count; ++index) {
    const Work work(call, tiles[index]);
    work.begin(whole);
    for (; piece < num_pieces && pieces[piece].tile == index; ++piece) work.merge(parts[piece], whole);
    work.finish(whole);
  }
}

template <typename Work>
void attend(const Attention& call) {
  const int64_t rows = call.query_start[call.requests], row_size = call.query_heads * call.cache.head_size;
  // Rows of no request.
  with_type(call.cache.type, [&](auto type) {
    std::fill_n(static_cast<decltype(type)*>(call.out) + rows * row_size, (call.rows - rows) * row_size, type);
  });
  int64_t count = 0, products = 0;  // tiles, and what their vectors look at
  for (int64_t request = 0; request < call.requests; ++request) {
    count += call.cache.heads * tiles_of_head(call, request, Work::kTile);
    const int64_t own = call.query_start[request + 1] - call.query_start[request];
    products += own * call.query_heads * call.seq_lens[request] * call.cache.head_size;
  }
  const Buffer<Tile> tiles(count);
  list_tiles(call, Work::kTile, tiles.data());
  const int64_t threads = pool().size();
  if (threads > 1 && count < 4 * threads && products > kProducts) {
    int64_t num_pieces = 0;
    for (int64_t index = 0; index < count; ++index) num_pieces += Work(call, tiles[index]).partitions();
    if (num_pieces > count) return shared_tiles<Work>(call, tiles, count, num_pieces);
  }
  whole_tiles<Work>(call, tiles, count, products > kProducts ? std::min(count, threads) : std::min<int64_t>(count, 1));
}

// Of queries of bf16.
#if defined(__AMX_BF16__)
template <typename K>
using Halves = AmxTile<K>;
#else
template <typename K>
using Halves = VectorTile<K>;
#endif

}  // namespace

void attention(const Attention& call) {
  const bool halves = call.cache.type == Type::bf16;
  if (call.cache.kept == Kept::int8) halves ? attend<Halves<Int8>>(call) : attend<VectorTile<Int8>>(call);
  else if (call.cache.kept == Kept::fp8) halves ? attend<Halves<E4M3>>(call) : attend<VectorTile<E4M3>>(call);
  else if (halves) attend<Halves<bf16>>(call);
  else attend<VectorTile<float>>(call);
}

}  // namespace octavo::OCTAVO_LEVEL
