"""python -m tests.gpu.whole [names…] [--layers 4] [--jobs 12]: whole HuggingFace models, unmodified, under Inductor and under FlashFX.

Real widths, a few layers, random weights, bfloat16: milliseconds of a training step and of inference, of them the GPU's kernels (where those are much
less, the host is what takes the time, and CUDA graphs or more layers to a step are what helps), peak memory, and how many times as fast as the peer
both are. The peer is Inductor with the model's SDPA attention, or with its eager attention where transformers offers no other. Models are compiled
beside each other, a process each, and timed one after the other when all of them wait.
"""
from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers as T

import flashfx  # noqa: F401  (registers the backend in a plain checkout)

from .speed import clocks, median_ms

VOCABULARY = 32000
SMALL = dict(vocab_size=VOCABULARY, use_cache=False)


def tokens(batch: int, length: int, left: float = 0.0, right: float = 0.0, masked: bool = True) -> dict[str, torch.Tensor]:
    """Random tokens. left, right: the share of them that is padding, from none in the first sequence to this in the last."""
    ids, mask = torch.randint(10, VOCABULARY, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        share = row / max(batch - 1, 1)
        mask[row, :int(left * share * length)] = 0
        mask[row, length - int(right * share * length):] = 0
    return {"input_ids": ids} | ({"attention_mask": mask} if masked else {})


def decoded(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": torch.randint(10, VOCABULARY, (batch, length))}


MODELS = {
    "bert": (lambda n: T.BertConfig(num_hidden_layers=n, vocab_size=VOCABULARY), lambda: tokens(32, 512, right=0.5), "B32 N512, padding, dropout 0.1"),
    "modernbert": (lambda n: T.ModernBertConfig(num_hidden_layers=n, vocab_size=50368), lambda: tokens(16, 2048, right=0.5), "B16 N2048, padding, window"),
    "deberta": (lambda n: T.DebertaV2Config(hidden_size=768, num_hidden_layers=n, num_attention_heads=12, intermediate_size=3072, vocab_size=VOCABULARY,
                                            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256, share_att_key=True),
                lambda: tokens(16, 512, right=0.4), "B16 N512, padding, relative positions, dropout 0.1"),
    "vit": (lambda n: T.ViTConfig(hidden_size=1024, num_hidden_layers=n, num_attention_heads=16, intermediate_size=4096),
            lambda: {"pixel_values": torch.randn(64, 3, 224, 224)}, "B64 N197"),
    "sam": (lambda n: T.SamVisionConfig(num_hidden_layers=n, global_attn_indexes=[n - 1]), lambda: {"pixel_values": torch.randn(2, 3, 1024, 1024)},
            "B2 N4096, one layer of four, and windows of 196, decomposed relative positions"),
    "whisper": (lambda n: T.WhisperConfig(d_model=1024, encoder_layers=n, decoder_layers=n, encoder_attention_heads=16, decoder_attention_heads=16,
                                          encoder_ffn_dim=4096, decoder_ffn_dim=4096, use_cache=False),
                lambda: {"input_features": torch.randn(8, 80, 3000)} | decoded(8, 448), "B8 N1500 and 448"),
    "t5": (lambda n: T.T5Config(d_model=1024, num_layers=n, num_decoder_layers=n, num_heads=16, d_ff=4096, d_kv=64, **SMALL),
           lambda: tokens(16, 512, right=0.4) | decoded(16, 512), "B16 N512, padding, bucket table trained, dropout 0.1"),
    "bloom": (lambda n: T.BloomConfig(hidden_size=1024, n_layer=n, n_head=16, **SMALL), lambda: tokens(8, 2048, left=0.3), "B8 N2048, padding, ALiBi"),
    "gpt_neox": (lambda n: T.GPTNeoXConfig(hidden_size=2048, num_hidden_layers=n, num_attention_heads=16, intermediate_size=8192, attention_dropout=0.1, **SMALL),
                 lambda: tokens(8, 2048, right=0.3), "B8 N2048, padding, dropout 0.1"),
    "llama": (lambda n: T.LlamaConfig(hidden_size=2048, num_hidden_layers=n, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, **SMALL),
              lambda: tokens(4, 4096, masked=False), "B4 N4096, grouped queries, heads of 64"),
    "llama_padded": (lambda n: T.LlamaConfig(hidden_size=4096, num_hidden_layers=n, num_attention_heads=32, num_key_value_heads=8, intermediate_size=11008, **SMALL),
                     lambda: tokens(4, 2048, left=0.3), "B4 N2048, grouped queries, heads of 128, padding"),
    "mistral": (lambda n: T.MistralConfig(hidden_size=4096, num_hidden_layers=n, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
                                          sliding_window=1024, **SMALL), lambda: tokens(2, 8192, masked=False), "B2 N8192, grouped queries, window of 1024"),
    "gemma2": (lambda n: T.Gemma2Config(hidden_size=2304, num_hidden_layers=n, num_attention_heads=8, num_key_value_heads=4, head_dim=256, intermediate_size=9216,
                                        sliding_window=1024, **SMALL), lambda: tokens(4, 4096, masked=False), "B4 N4096, heads of 256, soft cap, windows"),
}
ONLY_EAGER = "bloom", "deberta"
"""Of these transformers offers no SDPA attention."""


def prepared(name: str, attention: str, backend: str, layers: int, train: bool):
    """A step of the compiled model."""
    config, batch, _ = MODELS[name]
    torch.manual_seed(0)
    model = T.AutoModel.from_config(config(layers), attn_implementation=attention).cuda().bfloat16().train(train)
    inputs = {k: x.cuda().bfloat16() if x.is_floating_point() else x.cuda() for k, x in batch().items()}
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        if not train:
            with torch.no_grad():
                compiled(**inputs)
            return
        model.zero_grad(set_to_none=True)
        compiled(**inputs).last_hidden_state.float().square().mean().backward()
    return step


def kernels_ms(step) -> float:
    """Of one step, the time that kernels take on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / 1e3


def work(name: str, layers: int, folder: Path, count: int) -> None:
    """Compile all cases of a model, wait for the other models, and time them while no other is timed."""
    torch._dynamo.config.recompile_limit = 64  # the cases share the model's code
    cases = [("eager", "flashfx")] if name in ONLY_EAGER else [("sdpa", "flashfx"), ("eager", "flashfx")]
    cases.insert(0, ("eager" if name in ONLY_EAGER else "sdpa", "inductor"))
    steps = {(*case, train): prepared(name, *case, layers, train) for train in (True, False) for case in cases}
    for step in steps.values():
        step()
    torch.cuda.synchronize()
    (folder / name).touch()
    while sum(1 for _ in folder.iterdir()) < count + 1:  # and the lock
        time.sleep(0.2)
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {}
        for key, step in steps.items():
            torch.cuda.reset_peak_memory_stats()
            found[key] = median_ms(step, 9), torch.cuda.max_memory_allocated() / 2 ** 30
        busy = {key: kernels_ms(step) for key, step in steps.items()}  # behind all others: what the profiler leaves makes launches slower
        print(f"{name} ({MODELS[name][2]}) [{clocks()}]")
        for case in cases:
            cells = []
            for train in (True, False):
                (ms, gib), (peer, _), kernels, peers = found[*case, train], found[*cases[0], train], busy[*case, train], busy[*cases[0], train]
                cells.append(f"{ms:7.2f} ms, kernels {kernels:7.2f}, {gib:5.2f} GiB, {peer / ms:4.2f} and {peers / kernels:4.2f}")
            print(f"  {case[0]:<5} attention, {case[1]:<8}  training {cells[0]}   inference {cells[1]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.whole", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=len(MODELS), help="models that are compiled beside each other")
    parser.add_argument("--in", dest="folder", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    unknown = {*options.names} - {*MODELS}
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    T.logging.set_verbosity_error()
    if options.folder:
        work(options.names[0], options.layers, Path(options.folder), options.jobs)
        return 0
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", T.__version__)
    names, failed = options.names or list(MODELS), []
    for first in range(0, len(names), options.jobs):
        group = names[first:first + options.jobs]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "lock").touch()
            command = [sys.executable, "-m", "tests.gpu.whole", "--layers", str(options.layers), "--jobs", str(len(group)), "--in", folder]
            environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
            running = {name: subprocess.Popen([*command, name], env=environment) for name in group}
            while any(process.poll() is None for process in running.values()):
                for name, process in running.items():
                    if process.poll():
                        (Path(folder) / name).touch()  # the others do not wait for it
                time.sleep(0.2)
            failed += [name for name, process in running.items() if process.returncode]
    if failed:
        print("FAILED:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
