"""llama.cpp's logits of a text, under the interpreter that has its Python binding:
``PYTHON -m benchmarks.peers.llama_cpp_logits FILE.gguf IDS.json OUT.npy THREADS``.

IDS.json: a list of token ids; OUT.npy: float32 [tokens, vocabulary], what follows each.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> int:
    model_path, ids_path, out_path, threads = sys.argv[1:]
    ids = json.loads(Path(ids_path).read_text())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = max(len(ids), 32)
    params.n_threads = params.n_threads_batch = int(threads)
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for row, token in enumerate(ids):
        batch.token[row], batch.pos[row], batch.logits[row] = token, row, True
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
    if llama_cpp.llama_decode(context, batch) != 0:
        print(f"llama.cpp could not compute {len(ids)} tokens", file=sys.stderr)
        return 1
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocabulary,))
        for row in range(len(ids))
    ]
    np.save(out_path, np.stack(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
