# SPDX-License-Identifier: Apache-2.0
"""The options of ``python -m bench``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core.clone import RESULTS
from bench.cpu import bf16_attention, cases, quantized, run_time_masks, sparse_mlp
from bench.decoder import mlp_models
from bench.gpu.cases import GRIDS
from bench.texts import text_models
from bench.texts.cuda_models import CUDA_PRECISIONS
from bench.texts.lengths import LENGTHS
from stof.bench.cli import add_model_options
from stof.tensorrt.describe_installation import describe_installation
from stof.terminal import Parser, VersionAction

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="python -m bench", description="Times stof beside its baselines (docs/design/benchmarks.md).")
    parser.add_argument("--version", action=VersionAction, describe=describe_installation)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_attention(commands)
    _add_decode(commands)
    _add_sparse_mlp(commands)
    _add_run_time_masks(commands)
    _add_bf16_attention(commands)
    _add_quantized(commands)
    _add_sites(commands)
    _add_model(commands)
    _add_texts(commands)
    _add_decoder(commands)
    _add_decoder_mlp(commands)
    _add_generation(commands)
    _add_search(commands)
    _add_stored(commands)
    return parser


def _add_runs(command: Parser, threads: list[int], has_rounds: bool = True) -> None:
    """How often a command measures, and where it stores what it measures."""
    command.add_argument("--threads", nargs="+", type=int, default=threads)
    command.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    if has_rounds:
        command.add_argument("--rounds", type=int, default=None, help="default: 5 on a CPU, 7 on a GPU")


def _add_attention(commands: Commands) -> None:
    attention = commands.add_parser("attention", help="the grids of the attention operator")
    attention.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    attention.add_argument("--grid", nargs="+", choices=GRIDS, default=["paper"], help="of --device cuda")
    attention.add_argument("--masks", nargs="+", default=None, metavar="NAME", help="default: all")
    attention.add_argument("--lengths", nargs="+", type=int, default=None, metavar="S", help="default: all")
    attention.add_argument(
        "--batches", nargs="+", type=int, default=None, metavar="B", help="of --grid paper; default: all"
    )
    attention.add_argument("--peers", nargs="+", default=None, metavar="NAME", help="default: all")
    attention.add_argument(
        "--kernels", action="store_true", help="of --device cuda: time every kernel of each point, too"
    )
    attention.add_argument("--again", type=int, default=0, metavar="N", help="time points that lose N times more")
    attention.add_argument("--limit", type=float, metavar="SECONDS", help="of --device cuda: begin no point after that")
    _add_runs(attention, threads=[1, 2])


def _add_decode(commands: Commands) -> None:
    decode = commands.add_parser("decode", help="steps of a decoder beside GroupQueryAttention, on a CPU")
    decode.add_argument("--lengths", nargs="+", type=int, default=None, metavar="T", help="default: all")
    decode.add_argument("--batches", nargs="+", type=int, default=None, metavar="B", help="default: all")
    decode.add_argument("--heads", nargs="+", type=int, default=None, metavar="G", help="of keys; default: all")
    decode.add_argument("--sizes", nargs="+", type=int, default=None, metavar="D", help="of a head; default: all")
    decode.add_argument("--caches", nargs="+", default=None, metavar="TYPE", help="fp32, int8; default: both")
    _add_runs(decode, threads=[1, 2])


def _add_sparse_mlp(commands: Commands) -> None:
    mlp = commands.add_parser("sparse-mlp", help="the MLP of active neurons beside the dense one, on a CPU")
    mlp.add_argument("--device", choices=["cpu"], default="cpu")
    shapes = [*sparse_mlp.SHAPES, *sparse_mlp.SMALL_SIZES]
    large = ", ".join(sparse_mlp.SHAPES)
    mlp.add_argument("--shapes", nargs="+", choices=shapes, default=None, help=f"default: {large}")
    mlp.add_argument("--modes", nargs="+", choices=sparse_mlp.MODES, default=None, help="default: all")
    mlp.add_argument("--precisions", nargs="+", choices=sparse_mlp.PRECISIONS, default=None, help="default: all")
    mlp.add_argument("--tokens", nargs="+", type=int, default=None, metavar="T", help="default: 1, 4, 16")
    mlp.add_argument("--densities", nargs="+", type=float, default=None, metavar="D", help="0 to 1; default: all")
    _add_runs(mlp, threads=[1, 2])


def _add_run_time_masks(commands: Commands) -> None:
    masks = commands.add_parser(
        "run-time-masks", help="what --sparsify leaves out at run time, beside every key, on a CPU"
    )
    masks.add_argument("--kinds", nargs="+", choices=run_time_masks.KINDS, default=None, help="default: all")
    masks.add_argument("--lengths", nargs="+", type=int, default=None, metavar="T", help="default: two of each kind")
    masks.add_argument(
        "--shares", nargs="+", type=float, default=None, metavar="X", help="0 to 1; of blocks that decide or pages"
    )
    masks.add_argument("--rows", nargs="+", type=int, default=None, metavar="N", help="of a page; default: 16, 64")
    _add_runs(masks, threads=[1, 2])


def _add_bf16_attention(commands: Commands) -> None:
    attention = commands.add_parser(
        "bf16-attention", help="attention with bf16 matmuls beside fp32 and peers in bf16, on a CPU"
    )
    attention.add_argument("--masks", nargs="+", choices=bf16_attention.MASKS, default=None, help="default: all")
    attention.add_argument("--lengths", nargs="+", type=int, default=None, metavar="S", help="default: 512, 4096")
    attention.add_argument(
        "--sizes", nargs="+", type=int, default=None, metavar="D", help="of a head; default: 64, 128"
    )
    attention.add_argument("--peers", nargs="+", default=None, metavar="NAME", help="default: all")
    _add_runs(attention, threads=[1, 2])


def _add_quantized(commands: Commands) -> None:
    models = commands.add_parser("quantized", help="whole quantized models before and after, on a CPU")
    models.add_argument(
        "--models", nargs="+", default=quantized.MODELS, metavar="NAME", help="stored graphs of models/"
    )
    models.add_argument("--formats", nargs="+", choices=quantized.FORMATS, default=list(quantized.FORMATS))
    models.add_argument("--operators", nargs="+", choices=quantized.OPERATORS, default=["matmul"])
    models.add_argument("--lengths", nargs="+", type=int, default=[512], metavar="S")
    models.add_argument("--threads", type=int, default=2)
    models.add_argument("--rounds", type=int, default=5)
    models.add_argument("--folder", type=Path, default=Path("build/bench/quantized"), metavar="DIR", help="of models")
    models.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")


def _add_sites(commands: Commands) -> None:
    sites = commands.add_parser("sites", help="the first models' attention shapes beside ONNX Runtime's own nodes")
    sites.add_argument("--lengths", nargs="+", type=int, default=list(cases.SITE_LENGTHS), metavar="S")
    _add_runs(sites, threads=[1, 2])


def _add_model(commands: Commands) -> None:
    model = commands.add_parser("model", help="a whole model before and after stof-optimize")
    model.add_argument("model", help="an .onnx file, or the name of a graph under models/graphs")
    add_model_options(model)
    # A user's own file is measured wherever the user is: results of it are stored where --results says.
    model.add_argument(
        "--results", type=Path, default=None, metavar="DIR", help="default: docs/results for graphs of models/"
    )
    model.add_argument("--prepared", type=Path, metavar="DIR", help="of --device cuda: fp16 graphs without weights")
    model.add_argument("--prepare", action="store_true", help="write them, which needs no GPU, and end")
    model.add_argument("--lock", type=Path, metavar="FILE", help="of --device cuda: processes with it time in turns")


def _add_texts(commands: Commands) -> None:
    texts = commands.add_parser("texts", help="models that embed and rerank, on batches of padded texts")
    texts.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    default = ", ".join(text_models.DEFAULT_MODELS)
    texts.add_argument(
        "--models", nargs="+", choices=list(text_models.MODELS), default=None, help=f"default: {default}"
    )
    precisions = (*text_models.PRECISIONS, *CUDA_PRECISIONS)
    texts.add_argument("--precisions", nargs="+", choices=precisions, default=None, help="default: all of the device")
    texts.add_argument(
        "--lengths", nargs="+", choices=list(LENGTHS), default=None, help="of the texts; default: the model's"
    )
    texts.add_argument("--peers", nargs="+", default=None, metavar="NAME", help="default: all")
    texts.add_argument("--batch", nargs="+", type=int, default=[32], metavar="B", help="texts of a batch (32)")
    texts.add_argument("--batches", type=int, default=2, metavar="N", help="run in each order, of 1,024 texts (2)")
    texts.add_argument("--seed", type=int, default=0, help="of lengths and tokens")
    texts.add_argument("--no-memory", action="store_true", help="do not measure peak memory (on a GPU nobody does)")
    texts.add_argument("--limit", type=float, metavar="SECONDS", help="begin no point after that")
    _add_runs(texts, threads=[2])
    texts.set_defaults(results=RESULTS / "texts")


def _add_decoder(commands: Commands) -> None:
    decoder = commands.add_parser("decoder", help="a whole decoder of random weights, its tokens and a prompt")
    decoder.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    decoder.add_argument("--lengths", nargs="+", type=int, default=None, metavar="T", help="keys behind a token")
    decoder.add_argument(
        "--batches", nargs="+", type=int, default=None, metavar="B", help="default: 1 and a larger one"
    )
    decoder.add_argument("--heads", nargs="+", type=int, default=None, metavar="G", help="of keys (8 and 32; CPU: 2)")
    decoder.add_argument("--prompt", type=int, default=None, metavar="S", help="32768 (CPU: 1024); 0: none")
    decoder.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="default: all")
    decoder.add_argument("--prepared", type=Path, metavar="DIR", help="optimized graphs, without weights")
    decoder.add_argument("--prepare", action="store_true", help="write them, which needs no GPU, and end")
    _add_runs(decoder, threads=[2])


def _add_decoder_mlp(commands: Commands) -> None:
    mlps = commands.add_parser("decoder-mlp", help="a whole decoder whose MLPs are sparse beside the dense one")
    mlps.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    mlps.add_argument("--models", nargs="+", choices=list(mlp_models.MODELS), required=True)
    mlps.add_argument("--precisions", nargs="+", choices=mlp_models.PRECISIONS, default=["float32"])
    mlps.add_argument(
        "--active", type=float, default=None, metavar="SHARE", help="of the neurons; default: the model's"
    )
    mlps.add_argument(
        "--idle", type=float, default=0.0, metavar="SHARE", help="of the neurons: they are never active (0)"
    )
    mlps.add_argument("--batch", type=int, default=1, metavar="B", help="sequences of a token")
    mlps.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="default: all")
    mlps.add_argument("--no-memory", action="store_true", help="do not measure resident memory")
    mlps.add_argument("--no-times", action="store_true", help="measure resident memory alone")
    _add_runs(mlps, threads=[2])


def _add_generation(commands: Commands) -> None:
    generation = commands.add_parser(
        "decode-genai", help="a model folder of ONNX Runtime GenAI before and after, on the CPU"
    )
    generation.add_argument("folder", type=Path, help="the model folder (models/genai.py builds some)")
    generation.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384], metavar="T")
    generation.add_argument("--tokens", type=int, default=32, metavar="N", help="timed at each context (32)")
    generation.add_argument("--optimized", type=Path, metavar="DIR", help="default: made when it is not there")
    _add_runs(generation, threads=[2], has_rounds=False)


def _add_search(commands: Commands) -> None:
    search = commands.add_parser("search", help="the search for fusion schemes beside others, region by region")
    search.add_argument(
        "model", type=Path, nargs="?", help="an .onnx file; without, spaces of stored graphs are enumerated"
    )
    search.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    search.add_argument("--batch", type=int, default=1)
    search.add_argument("--length", type=int, default=128, metavar="S")
    search.add_argument("--measured", action="store_true", help="times on this device in place of the analytical cost")
    search.add_argument("--seed", type=int, default=0)


def _add_stored(commands: Commands) -> None:
    merge = commands.add_parser("merge", help="results that another machine wrote, into those here")
    merge.add_argument("found", type=Path, metavar="DIR", help="the folder that the other machine wrote")
    merge.add_argument("results", type=Path, metavar="INTO", help="for instance docs/results/h100")
    table = commands.add_parser("table", help="tables of the stored results, in Markdown")
    table.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    table.add_argument("-o", "--output", type=Path, help="the file to write (default: the terminal)")
    plot = commands.add_parser("plot", help="pictures of the GPU's grids; needs matplotlib")
    plot.add_argument("results", type=Path, metavar="DIR", help="a machine's folder, for instance docs/results/h100")
    plot.add_argument("-o", "--output", type=Path, default=Path("docs/plots"), metavar="DIR")
