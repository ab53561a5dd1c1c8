// Sampling: the arguments of the kernel (sample.cpp), and the parts of it that are the same on every level.
#pragma once

#include <cstdint>

namespace octavo {

// How the logits of some rows are changed before temperature, on copies: logprobs are of the raw ones. Entries of all
// changes lie behind each other; those of change c from start[c] to start[c + 1]:
//
//   rows           │ 2        │ 5  │ 7           │
//   penalty_start  │ 0        │ 3  │ 3           │ 7
//   penalty_ids    │ a  b  c  │    │ d  e  f  g  │
struct Changes {
  int64_t count;
  const int64_t* rows;
  const bool* ready;    // the copy is there already, and changed (custom processors)
  float* copies;        // [count, vocabulary]
  const int64_t *penalty_start, *penalty_ids, *penalty_counts;  // counts: how often an id has been generated
  const double* penalties;                                      // [count, 3]: repetition, frequency, presence
  const int64_t *bias_start, *bias_ids;
  const double* bias;
  const uint64_t* forbidden;  // addresses of bool [vocabulary], true where a token may not be sampled; 0: all may
  const int64_t *banned_start, *banned_ids;
};

// Lists of logprobs of the raw distribution, behind each other; that of row r from start[r] to start[r + 1], empty where
// it asks for none. First the sampled token, then the most likely ones, or those that were named.
struct Logprobs {
  const int64_t* start;  // [rows + 1], or null: nobody asks
  const bool* named;     // [rows]: the ids after the first are given
  int64_t* ids;
  float* logprobs;
  int64_t* ranks;        // of the first, and of named ones; 1 is the most likely of the vocabulary
};

enum class Status : int8_t { fine = 0, nan = 1, empty = 2 };  // empty: nothing but -inf

struct Sample {
  const float* logits;  // [rows, vocabulary]
  int64_t stride;       // from row to row
  int64_t rows, vocabulary;
  bool score;           // tokens are given, and only their logprobs are wanted
  // [rows] each, null where tokens are given. Temperature 0 takes the most likely token; top_k 0 keeps all.
  const double *temperature, *min_p, *top_p;
  const int64_t *top_k, *seed, *choice_index, *position;
  Changes changes;
  Logprobs logprobs;
  int64_t* tokens;      // [rows]; anything in rows that are not fine
  Status* status;       // [rows]
};

struct Likely {
  float logit;
  int32_t id;
};

// One number in [0, 1) for a row, a multiple of 2^-53: Philox-4x32-10 over (position, choice) with the seed as key.
double uniform(int64_t seed, int64_t choice_index, int64_t position);

// Makes the copy of a row, and changes it.
void change_row(const Sample& call, int64_t change);

// The `wanted` most likely first, in order: larger logits first, of equal ones lower ids.
void order_by_likelihood(Likely* tokens, int64_t count, int64_t wanted);

// Ranks of `count` ids in the vocabulary, each in that order.
void rank_all(const float* logits, int64_t vocabulary, const int64_t* ids, int64_t count, int64_t* ranks);

}  // namespace octavo
