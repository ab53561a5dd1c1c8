// Python's view of the library: raw addresses and sizes in, nothing out. octavo/kernels/native.py checks tensors' types
// and sizes, check.cpp what is in them; the Python lock is released while a kernel works.

#include <atomic>
#include <chrono>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "amx.hpp"
#include "check.hpp"
#include "dequantize.hpp"
#include "dispatch.hpp"
#include "replay.hpp"
#include "sample_bindings.hpp"
#include "step_bindings.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;
using namespace octavo;

namespace {

std::atomic<const Kernels*> chosen{kernels_of("generic")};

// What kernels have taken so far. The rest of a step is the engine's own time.
std::atomic<int64_t> nanoseconds{0};

// Around each kernel: the Python lock is released, and the time is taken.
class Working {
 public:
  Working() : start_(std::chrono::steady_clock::now()) {}
  ~Working() {
    nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  nb::gil_scoped_release release_;
  PlainFloats floats_;
  std::chrono::steady_clock::time_point start_;
};

using Address = uintptr_t;
template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Type, how numbers are kept, data, blocks, block size, heads, head size.
using Cache = std::tuple<int, int, Address, int64_t, int64_t, int64_t, int64_t>;

KVCache cache_of(const Cache& given) {
  const auto& [type, kept, data, blocks, block_size, heads, head_size] = given;
  return {static_cast<Type>(type), static_cast<Kept>(kept), at<void>(data), blocks, block_size, heads, head_size};
}

void choose(const std::string& level, int threads) {
  const Kernels* found = kernels_of(level);
  if (found == nullptr) throw nb::value_error("no such level on this machine");
  if (threads < 1) throw nb::value_error("at least one thread is needed");
  const nb::gil_scoped_release release;  // while another thread's kernel ends
  pool().resize(threads);
  chosen = found;
}

void run(const Call& call) {
  if (recording != nullptr) return recording->add(call);
  const Working working;
  make(*chosen.load(), call);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);
  m.def("available_levels", &available_levels);
  m.def("refused_levels", &refused_levels);
  m.def("choose", &choose);
  m.def("kernel_seconds", [] { return static_cast<double>(nanoseconds) * 1e-9; });
  m.def("stream", [](Address data, int64_t bytes) {
    const Working working;
    chosen.load()->stream(at<void>(data), bytes);
  });
  m.def("multiply_bf16", [] {
    const Working working;
    return chosen.load()->multiply_bf16();
  });
  m.def("multiply_f32", [] {
    const Working working;
    return chosen.load()->multiply_f32();
  });
  m.def("multiply_int8", [] {
    const Working working;
    return chosen.load()->multiply_int8();
  });
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.def("packed_bytes", [](int type, int64_t out_size, int64_t in_size, bool gated) {
    return packed_bytes(static_cast<Type>(type), out_size, in_size, gated);
  });
  m.def("pack", [](int type, Address weight, int64_t first_row, int64_t rows, int64_t out_size, int64_t in_size,
                   bool gated, Address packed) {
    if (recording != nullptr) throw nb::value_error("a recorded forward packs no weights");
    const nb::gil_scoped_release release;
    pack(static_cast<Type>(type), at<void>(weight), first_row, rows, out_size, in_size, gated, at<void>(packed));
  });
  m.def("coded_bytes", [](int64_t out_size, int64_t in_size, bool gated) -> int64_t {
    return chosen.load()->encode == nullptr ? 0 : coded_bytes(out_size, in_size, gated);
  });
  m.def("encode", [](Address packed, int64_t out_size, int64_t in_size, bool gated, Address coded) {
    const Kernels& kernels = *chosen.load();
    if (kernels.encode == nullptr || coded_bytes(out_size, in_size, gated) == 0)
      throw nb::value_error("no coded weights of this shape, or at this level");
    const nb::gil_scoped_release release;
    return kernels.encode({at<void>(packed), at<uint8_t>(coded), packed_blocks(out_size, gated), in_size});
  });
  m.def("packed_block_bytes", [](int format, int64_t span, int64_t out_size, int64_t in_size, bool gated) {
    return packed_block_bytes(static_cast<Format>(format), span, out_size, in_size, gated);
  });
  m.def("file_row_bytes", [](int format, int64_t span, int64_t in_size) {
    return file_row_bytes(static_cast<Format>(format), span, in_size);
  });
  m.def("pack_blocks", [](int format, int64_t span, Address rows, int64_t first_row, int64_t count, int64_t out_size,
                          int64_t in_size, bool gated, Address packed) {
    if (recording != nullptr) throw nb::value_error("a recorded forward packs no weights");
    const nb::gil_scoped_release release;
    pack_blocks(static_cast<Format>(format), span, at<void>(rows), first_row, count, out_size, in_size, gated,
                at<void>(packed));
  });
  m.def("half_scale", [](int format, int64_t span, Address packed, int64_t out_size, int64_t in_size, bool gated) {
    if (!chosen.load()->halves || !processor_has_halves()) return 0.0f;
    const nb::gil_scoped_release release;
    return half_scale(static_cast<Format>(format), span, at<uint8_t>(packed), packed_blocks(out_size, gated), in_size);
  });
  nb::class_<Recording>(m, "Recording")
      .def(nb::init<int64_t, int64_t>())
      .def("begin", [](Recording& self) { recording = &self; })
      .def("end", [](Recording&) { recording = nullptr; })
      .def("same_calls", &Recording::same_calls)
      .def("kernels", &Recording::kernels)
      .def("run", [](const Recording& self, int64_t rows, int64_t requests) {
        const Working working;
        self.run(*chosen.load(), rows, requests);
      });
  m.def("dequantize", [](int type, Address blocks, int64_t count, Address values) {
    if (type < 0 || type > static_cast<int>(Blocks::q5_1)) throw nb::value_error("no such type of blocks");
    const nb::gil_scoped_release release;
    dequantize(static_cast<Blocks>(type), at<void>(blocks), count, at<float>(values));
  });
  m.def("quantize", [](int type, Address x, int format, Address blocks, int64_t rows, int64_t in_size) {
    const Format target = static_cast<Format>(format);
    if (target != Format::q4_1 && target != Format::q8_0) throw nb::value_error("no such type to quantize to");
    const nb::gil_scoped_release release;
    const PlainFloats floats;
    return chosen.load()->quantize({static_cast<Type>(type), at<void>(x), target, at<uint8_t>(blocks), rows, in_size});
  });
  m.def("embedding", [](int type, Address ids, int format, int64_t span, Address weight, float scale, int out_type,
                        Address out, int64_t rows, int64_t size, int64_t vocabulary) {
    run(Embedding{static_cast<Type>(type), at<int64_t>(ids), static_cast<Format>(format), span, at<void>(weight), scale,
                  static_cast<Type>(out_type), at<void>(out), rows, size, vocabulary});
  });
  m.def("linear", [](int type, Address x, int64_t x_stride, int format, int64_t span, Address weight, Address bias,
                     Address out, int64_t out_stride, int out_type, int64_t rows, int64_t in_size, int64_t out_size,
                     Address residual, float multiplier, float softcap, bool gated, int function, float half_scale) {
    run(Linear{static_cast<Type>(type), at<void>(x), x_stride, static_cast<Format>(format), span, at<void>(weight),
               at<void>(bias), at<void>(out), out_stride, static_cast<Type>(out_type), rows, in_size, out_size,
               at<float>(residual), multiplier, softcap, gated, static_cast<Function>(function), half_scale});
  });
  m.def("norm", [](int type, Address x, int64_t x_stride, int weight_type, Address weight, Address bias,
                   bool head_weights, Address residual, int out_type, Address out, int64_t rows, int64_t heads,
                   int64_t size, float eps, bool center) {
    run(Norm{static_cast<Type>(type), at<void>(x), x_stride, static_cast<Type>(weight_type),
                               at<void>(weight), at<void>(bias), head_weights, at<float>(residual),
                               static_cast<Type>(out_type), at<void>(out), rows, heads, size, eps, center});
  });
  m.def("cast", [](int type, Address x, int64_t x_stride, int out_type, Address out, int64_t rows, int64_t size) {
    run(Cast{static_cast<Type>(type), at<void>(x), x_stride, static_cast<Type>(out_type),
                               at<void>(out), rows, size});
  });
  m.def("reorder", [](int type, Address x, int64_t x_stride, Address order, bool back, Address out, int64_t rows,
                      int64_t size) {
    run(Reorder{static_cast<Type>(type), at<void>(x), x_stride, at<int32_t>(order), back, at<void>(out), rows, size});
  });
  m.def("activation", [](int type, int function, Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
    run(Activation{static_cast<Type>(type), static_cast<Function>(function), at<void>(x),
                                           x_stride, at<void>(out), rows, size});
  });
  m.def("rotary_kv", [](const Cache& cache, Address positions, Address query, int64_t query_stride, Address key,
                        int64_t key_stride, Address value, int64_t value_stride, Address cos_sin, Address slots,
                        Address out, int64_t rows, int64_t query_heads, int64_t rotary_dim, int64_t max_position) {
    run(RotaryKV{cache_of(cache), at<int64_t>(positions), at<void>(query), at<void>(key), at<void>(value),
                 query_stride, key_stride, value_stride, at<float>(cos_sin), at<int64_t>(slots), at<void>(out), rows,
                 query_heads, rotary_dim, max_position});
  });
  m.def("store_kv", [](const Cache& cache, Address key, int64_t key_stride, Address value, int64_t value_stride,
                       Address slots, int64_t rows) {
    run(StoreKV{cache_of(cache), at<void>(key), at<void>(value), key_stride, value_stride, at<int64_t>(slots), rows});
  });
  m.def("attention", [](const Cache& cache, Address query, int64_t query_stride, Address out, Address query_start,
                        Address seq_lens, Address block_table, int64_t table_stride, int64_t table_width,
                        int64_t requests, int64_t rows, int64_t query_heads, float scale, int64_t window, float softcap,
                        Address sinks) {
    run(Attention{cache_of(cache), at<void>(query), query_stride, at<void>(out), at<int32_t>(query_start),
                  at<int32_t>(seq_lens), at<int32_t>(block_table), table_stride, table_width, requests, rows,
                  query_heads, scale, window, softcap, at<float>(sinks)});
  });
  bind_steps(m, [](FusedStep& step) {
    const Working working;
    step.compute(*chosen.load());
  });
  bind_sample(m, [](const Sample& call) {
    const Working working;
    check(call);
    chosen.load()->sample(call);
  });
}
