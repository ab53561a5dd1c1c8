"""llama.cpp's own quantizer, under the interpreter that has its Python binding:
``PYTHON -m benchmarks.peers.llama_cpp_quantize IN.gguf OUT.gguf Q4_K_M THREADS``."""

import sys

import llama_cpp


def main() -> int:
    source, target, type_name, threads = sys.argv[1:]
    file_type = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_name}", None)
    if file_type is None:
        prefix = "LLAMA_FTYPE_MOSTLY_"
        known = sorted(name.removeprefix(prefix) for name in dir(llama_cpp) if name.startswith(prefix))
        print(f"{type_name!r} is no type of llama.cpp's; known: {', '.join(known)}", file=sys.stderr)
        return 1
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = int(threads), file_type
    llama_cpp.llama_backend_init()
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) != 0:
        print(f"llama.cpp could not quantize {source}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
