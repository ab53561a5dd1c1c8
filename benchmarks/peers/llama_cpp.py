"""llama.cpp through its Python binding: one batch of all streams a step, each stream's next token by argmax."""

import llama_cpp
import numpy as np

from benchmarks.peers import work

_BATCH = 2048  # tokens handed over at once
_MICRO_BATCH = 512


class Streams:
    """A context for ``count`` streams of ``length`` tokens, and the batch they share."""

    def __init__(self, model: llama_cpp.llama_model_p, count: int, length: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(count * length, 512)
        params.n_seq_max = count
        params.n_batch, params.n_ubatch = _BATCH, _MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self._size = (count, length)
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def holds(self, count: int, length: int) -> bool:
        return count == self._size[0] and length <= self._size[1]

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        rows = [
            (token, position, stream, position == len(ids) - 1)
            for stream, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        tokens = [0] * len(prompts)
        for start in range(0, len(rows), _BATCH):
            self._step(rows[start : start + _BATCH], tokens)
        for index in range(output_len - 1):
            self._step([(tokens[s], len(ids) + index, s, True) for s, ids in enumerate(prompts)], tokens)

    def _step(self, rows: list[tuple[int, int, int, bool]], tokens: list[int]) -> None:
        """Computes (token, position, stream, whether its logits are wanted) rows; puts what follows into ``tokens``."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, stream, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for row, (_, _, stream, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, row)
                tokens[stream] = int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


def main() -> None:
    args = work.options()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), llama_cpp.llama_model_default_params())
    streams = Streams(model, 1, work.MAX_MODEL_LEN, args.threads)

    def generate(prompts: list[list[int]], output_len: int) -> None:
        nonlocal streams
        count, length = len(prompts), len(prompts[0]) + output_len
        if not streams.holds(count, length):
            streams.close()
            streams = Streams(model, count, length, args.threads)
        streams.generate(prompts, output_len)

    work.measure(args, llama_cpp.__version__, "GGUF", generate)


if __name__ == "__main__":
    main()
