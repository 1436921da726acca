"""Images of a diffusion pipeline whose UNet streams: stock, ballonet, and diffusers' own group offloading, a block at a
time and on a GPU with a stream for its copies. Each makes the same images of the same noise.

Times say something on a GPU alone: on the stand-in stock's modules lie in the memory that ballonet streams from, and
group offloading moves nothing. What the device holds is the most while an image is made, of all that the process has.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from harness import MIB, Benchmark, Figure, Functions, Options, in_turns, main, peers, report
from models import OURS, STOCK, environment, layer_page_size, seconds, titled, unlimited

import ballonet
from ballonet.hooks.pipeline import ManagedPipeline

GROUPS = "diffusers, group offloading"
CHANNELS = {"cuda": (320, 640, 1280, 1280), "cpu": (64, 128, 256, 256), "tiny": (32, 64, 256, 256)}
SIDE = {"cuda": 64, "cpu": 32, "tiny": 16}  # of an image, pixels of the UNet
STEPS = {"cuda": 20, "cpu": 3, "tiny": 2}


def measuring(chosen: Options) -> None:
    names = (STOCK, OURS, GROUPS)
    with peers(chosen, names, {OURS: environment(chosen)}) as started:
        took = in_turns(started, chosen.repetitions, "image")
        held = {name: float(peer.ask("held")) / MIB for name, peer in started.items()}
        streamed = started[OURS].ask("streamed") / MIB
        drawn = {name: peer.ask("drawn") for name, peer in started.items()}
    rows = [
        {
            "peer": name,
            "seconds of an image": figure,
            "over stock's": Figure.ratio(figure, took[STOCK]),
            "device, MiB": Figure.of([held[name]]),
            "streamed, MiB": Figure.of([streamed if name == OURS else 0.0]),
            "images that differ": Figure.of([float(drawn[name] != drawn[STOCK])]).at_most(0),
        }
        for name, figure in took.items()
    ]
    what = f"UNet of {CHANNELS[chosen.kind]} channels, {SIDE[chosen.kind]} pixels, {STEPS[chosen.kind]} steps"
    report(chosen, titled(chosen, what), rows)


class Painter:
    """A pipeline with random weights, in the process of one peer."""

    def __init__(self, name: str, chosen: Options) -> None:
        from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel

        self._chosen, self._drawn = chosen, ""
        self._managed: ManagedPipeline | None = None
        if name == OURS:
            most = None if chosen.cuda else unlimited(chosen)  # on a GPU what is free
            ballonet.install(most, host_budget=most, page_size=layer_page_size(chosen))
        torch.manual_seed(0)
        unet = UNet2DModel(
            sample_size=SIDE[chosen.kind],
            layers_per_block=2,
            block_out_channels=CHANNELS[chosen.kind],
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        ).eval()
        self._pipeline = DDIMPipeline(unet.to(torch.float16 if chosen.cuda else torch.float32), DDIMScheduler())
        self._pipeline.set_progress_bar_config(disable=True)
        if name == GROUPS:
            offload(unet, chosen)
        elif name == OURS:
            self._managed = ballonet.manage(self._pipeline, device=chosen.device, interval=1)
        else:
            self._pipeline.to(chosen.device)

    def functions(self) -> Functions:
        return {"image": self.image, "held": self.held, "streamed": self.streamed, "drawn": lambda: self._drawn}

    def image(self) -> float:
        """Seconds that an image takes."""
        if self._chosen.cuda:
            torch.cuda.reset_peak_memory_stats()
        return seconds(self._chosen.device, self._draw)

    def _draw(self) -> None:
        made = self._pipeline(
            generator=torch.Generator().manual_seed(3), num_inference_steps=STEPS[self._chosen.kind], output_type="np"
        )
        self._drawn = hashlib.sha256(made.images.tobytes()).hexdigest()

    def held(self) -> int:
        """The most bytes of the device while the last image was made; 0 where nobody counts them."""
        return torch.cuda.max_memory_allocated() if self._chosen.cuda else 0

    def streamed(self) -> int:
        """Bytes of weights that come over the link in a pass."""
        if self._managed is None:
            return 0
        (report,) = self._managed.report().values()
        return report.token_bytes


def offload(unet: Any, chosen: Options) -> None:
    """Has diffusers keep a block at a time on the device."""
    from diffusers.hooks import apply_group_offloading

    here, there = torch.device(chosen.device), torch.device("cpu")
    apply_group_offloading(
        unet, here, there, offload_type="block_level", num_blocks_per_group=1, use_stream=chosen.cuda
    )


def functions(name: str, chosen: Options) -> Functions:
    return Painter(name, chosen).functions()


BENCHMARKS = {"images": Benchmark(measuring, functions)}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
