/* SPDX-License-Identifier: Apache-2.0
 * C ABI of libstof_ort.so, libstof_ort.dylib or stof_ort.dll for tests, benchmarks, the tuner and Python (ctypes).
 * Every function that can fail returns 0 on success and otherwise writes a NUL-terminated message into
 * error[error_size]. A null pointer is an error where the function needs what it points to; others take it as nothing.
 * Memory behind data is as large as type and dims say. */
#ifndef STOF_PLUGINS_CORE_C_API_C_API_H_
#define STOF_PLUGINS_CORE_C_API_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define STOF_EXPORT __declspec(dllexport)
#else
#define STOF_EXPORT __attribute__((visibility("default")))
#endif

/* JSON: {"version", "build_id", "backends": ["cpu"], "cuda_architectures": [], "cpu_isa", "compiler"}. Static storage.
 */
STOF_EXPORT const char* stof_build_info(void);

typedef struct {
  void* data;
  int32_t dtype; /* onnx.TensorProto.DataType */
  int32_t rank;
  int64_t dims[8];
} stof_tensor;

/* ---- mask expressions ---- */
typedef struct stof_mask stof_mask;
typedef struct {
  const char* name; /* "table0", "pad", "segment_q", ... */
  stof_tensor tensor;
} stof_operand;
typedef struct {
  int64_t B, H, S, T, P;
} stof_sizes;

/* The constants (tables) are copied. Run-time operands are passed to stof_mask_eval. */
STOF_EXPORT int stof_mask_create(const char* expression, const stof_operand* tables, int table_count, stof_mask** mask,
                                 char* error, size_t error_size);
STOF_EXPORT void stof_mask_destroy(stof_mask* mask);
/* Canonical text; returns the length needed without NUL. */
STOF_EXPORT size_t stof_mask_print(const stof_mask* mask, char* text, size_t text_size);
STOF_EXPORT uint64_t stof_mask_hash(const stof_mask* mask);
/* allowed: [B, H, S, T] bytes 0/1. */
STOF_EXPORT int stof_mask_eval(const stof_mask* mask, const stof_sizes* sizes, const stof_operand* runtime,
                               int runtime_count, uint8_t* allowed, char* error, size_t error_size);

/* ---- block masks of the static part ---- */
typedef struct stof_block_mask stof_block_mask;
typedef struct {
  int64_t S, T, P;
  int32_t m, n, rows, layout_b, layout_h;
  int64_t tables, nnz, distinct;
  const int32_t *layout, *row_ptr, *full_begin, *key_tile, *bits_id;
  const uint32_t* bits;
} stof_block_mask_view;
STOF_EXPORT int stof_block_mask_create(const stof_mask* mask, const stof_sizes* sizes, int m, int n,
                                       stof_block_mask** block_mask, char* error, size_t error_size);
STOF_EXPORT void stof_block_mask_destroy(stof_block_mask* block_mask);
STOF_EXPORT void stof_block_mask_get(const stof_block_mask* block_mask, stof_block_mask_view* view);
/* entries, bytes, hits, misses, builds of the process-wide cache; clear != 0 empties it afterwards. */
STOF_EXPORT void stof_block_mask_cache_stats(int64_t stats[5], int clear);

/* ---- operators: the same descriptions that the runtime adapters use ---- */
typedef struct {
  const char* name;
  int32_t type; /* 0 int, 1 float, 2 string, 3 list of ints: decimal numbers in s, separated by blanks */
  int64_t i;
  double f;
  const char* s;
} stof_attribute;
typedef struct stof_op stof_op;
STOF_EXPORT int stof_op_create(const char* op_type, const stof_attribute* attributes, int attribute_count, stof_op** op,
                               char* error, size_t error_size);
STOF_EXPORT void stof_op_destroy(stof_op* op);
/* outputs: data preset by the caller, dtype and dims are checked against the op's own shape rule; a second one without
 * data is not computed. threads: 1 … 64. */
STOF_EXPORT int stof_op_run(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs,
                            int output_count, int threads, char* error, size_t error_size);

/* Bytes that a run on the CPU takes besides inputs and outputs, by types and shapes: constant inputs have data, others
 * need none. Of floats only the address is looked at: weights that have one count as given to stof_op_prepare. Lengths
 * of sequences, and tables of their blocks, may have data; without, caches count as full. threads: 1 … 64. An error
 * where only a run can tell. */
STOF_EXPORT int stof_op_workspace(const stof_op* op, const stof_tensor* inputs, int input_count, int threads,
                                  size_t* bytes, char* error, size_t error_size);

/* What the operators take, as JSON in static storage. Needs no device; a build without CUDA kernels gives the limits of
 * those kernels, too. Keys may be added; none changes its meaning or goes. Limits of `types` are those of inputs of one
 * type (onnx.TensorProto.DataType); an operator without types of its own has no `types`.
 * {"StofAttention": {"activations": [], "activations_with_zeros": [], "attributes": ["mask", ...], "roles": ["pad",
 * ...], "targets": {"cpu": {"types": {"1": {"largest_head_size": 256, ...}, ...}}, "cuda": ..., "tensorrt": ...}},
 * "StofChain": ..., ...} */
STOF_EXPORT const char* stof_op_limits(void);

/* The environment variables that the libraries read, as JSON in static storage: [{"name": "STOF_CPU_ISA", "type":
 * "word", "words": "portable avx2 ...", "default": "", "reader": "the library", "help": ..., "for_users": true,
 * "read_in_setuid": true}, ...]. Types are word, integer (with "least" and "most"), path and name. "value" is that of a
 * variable that is set when this is first called. Keys may be added; none changes its meaning or goes. */
STOF_EXPORT const char* stof_environment(void);
/* 1 and a message that names the variable, its value and the right ones, where one has a wrong value. No operator is
 * made then. The values count that the first call, or the first operator, finds. */
STOF_EXPORT int stof_environment_check(char* error, size_t error_size);

/* Whether the CUDA kernels of StofGemm have this epilogue (docs/reference/gemm-format.md): 0, and the form's words
 * separated by blanks; 1, and why not, which begins with "CUDA:" where the description itself is right. Needs no
 * device. */
STOF_EXPORT int stof_gemm_form(const char* epilogue, int pair, char* form, size_t form_size, char* error,
                               size_t error_size);
/* Likewise whether the CPU's kernels for products in fp32 by constants apply it to what is still in the cache. */
STOF_EXPORT int stof_gemm_cpu_form(const char* epilogue, int pair, char* form, size_t form_size, char* error,
                                   size_t error_size);

/* Pairs of queries and keys, in this process since it began or the counts were reset: counts[0] those that skip by
 * score, choose blocks (docs/reference/operators.md) or choose pages (docs/reference/cached-attention.md) could leave
 * out, counts[1] those among them that were left out. Waits for the CUDA devices that such an attention ran on. Null:
 * nothing. */
STOF_EXPORT void stof_skip_counts(uint64_t counts[2]);
STOF_EXPORT void stof_reset_skip_counts(void);

/* The instruction set whose kernels compute attention in bf16 on this machine where attribute allow_bf16 is 1:
 * "avx512_bf16", "amx_bf16" or "neon_bf16"; "" where there is none, and such nodes compute in fp32. STOF_CPU_ISA limits
 * it. Asks Linux for the permission to use tile registers where the processor has them, as the first such run would.
 * Static storage. */
STOF_EXPORT const char* stof_cpu_bf16_kernel(void);
/* The same of GEMMs (StofGemm) by constant weights. */
STOF_EXPORT const char* stof_cpu_bf16_gemm_kernel(void);
/* The same of attention over codes of 8 bits (StofQuantizedAttention), which every machine has: the name of a set of
 * STOF_CPU_ISA. */
STOF_EXPORT const char* stof_cpu_quantized_attention_kernel(void);

/* On a CUDA device. First the constants (the tables of a mask), once: all inputs, constant ones with data in host
 * memory, which is copied, the others with dtype 0. */
STOF_EXPORT int stof_op_prepare(stof_op* op, const stof_tensor* inputs, int input_count, char* error,
                                size_t error_size);
/* Queues the operator on `stream` (a cudaStream_t of the calling thread's device) and returns. Data are device
 * addresses; those of constants are not read. What the operator needs for itself it takes from `workspace`, device
 * memory that must stay alive and unshared until the work is done. May be captured into a graph after a first run with
 * the same shapes. */
STOF_EXPORT int stof_op_run_cuda(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs,
                                 int output_count, void* workspace, size_t workspace_size, void* stream, char* error,
                                 size_t error_size);

/* Likewise, with memory that `allocate` gives for `bytes` (at least 64-byte aligned; NULL: there is none) on demand,
 * from this thread and before the function returns. Each block must stay alive and unshared until the work is done. */
typedef void* (*stof_allocate)(void* context, size_t bytes);
STOF_EXPORT int stof_op_run_cuda_allocating(stof_op* op, const stof_tensor* inputs, int input_count,
                                            stof_tensor* outputs, int output_count, stof_allocate allocate,
                                            void* context, void* stream, char* error, size_t error_size);

/* The current device: its name, and 10 * major + minor of its compute capability. */
STOF_EXPORT int stof_cuda_device(char* name, size_t name_size, int32_t* capability, char* error, size_t error_size);
/* Names of the attention kernels of the current device for a head size and an element type, separated by blanks, as the
 * attribute `kernel` takes them; empty where there is no choice. */
STOF_EXPORT int stof_cuda_kernels(int64_t head_size, int32_t dtype, char* names, size_t names_size, char* error,
                                  size_t error_size);
/* Microseconds of one run of a prepared operator on the current device: the median of replays of a captured graph, for
 * about `seconds`. Inputs with data are host memory and copied; others are filled with random numbers. */
STOF_EXPORT int stof_op_time_cuda(stof_op* op, const stof_tensor* inputs, int input_count, int output_count,
                                  double seconds, double* microseconds, char* error, size_t error_size);

/* ---- the machine ---- */
/* Both 0 where there are no threads or no memory for it. */
/* Rate of dependent-free fp32 FMAs on `threads` threads, in GFLOP/s (best of the slices in `seconds`). */
STOF_EXPORT double stof_fma_rate(int threads, double seconds);
/* Read bandwidth over a buffer of `bytes`, in GB/s. */
STOF_EXPORT double stof_read_bandwidth(int threads, size_t bytes, double seconds);

#ifdef __cplusplus
}
#endif
#endif /* STOF_PLUGINS_CORE_C_API_C_API_H_ */
