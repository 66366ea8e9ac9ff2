"""An object detector of Hugging Face, trained in torch, finds shapes in JAX and draws boxes.

A small DETR, a ResNet with a transformer upon it, is trained for a minute on pictures of squares,
discs and triangles that are made on the way; then it is converted to JAX and verified, and a jitted
function finds the shapes in pictures that it has not seen. With `--out runs` they are saved with
their boxes. Nothing is downloaded; for a model with real weights `load()` has the line.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import torch
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

import fmapper

SIDE = 48  # pixels
CELLS = 4  # each quarter of a picture holds one shape at most, which is a query of its own
KINDS = ("square", "disc", "triangle")
NOTHING = len(KINDS)


def picture(rng):
    """A picture (3, 48, 48), the boxes (4, 4) as centre and size in [0, 1], and the kinds (4,)."""
    down, right = np.mgrid[:SIDE, :SIDE] + 0.5
    image = rng.normal(0.1, 0.05, (3, SIDE, SIDE)).astype(np.float32)
    boxes, kinds = np.zeros((CELLS, 4), np.float32), np.full(CELLS, NOTHING)
    for cell in range(CELLS):
        if rng.random() < 0.3:
            continue
        radius = rng.uniform(6, 10.5)
        corner = SIDE // 2 * np.array([cell % 2, cell // 2])
        x, y = np.clip(corner + rng.uniform(6, 18, 2), radius + 1, SIDE - radius - 1)
        across, along = right - x, down - y
        inside = np.maximum(abs(across), abs(along)) <= radius
        kinds[cell] = rng.integers(len(KINDS))
        if KINDS[kinds[cell]] == "disc":
            inside = across**2 + along**2 <= radius**2
        elif KINDS[kinds[cell]] == "triangle":
            inside &= abs(across) <= (along + radius) / 2
        image[:, inside] = rng.uniform(0.5, 1, (3, 1))
        boxes[cell] = (x, y, 2 * radius, 2 * radius)
    return image, boxes / SIDE, kinds


def pictures(count, seed):
    """Pictures (count, 3, 48, 48), their boxes and kinds."""
    rng = np.random.default_rng(seed)
    return tuple(map(np.stack, zip(*(picture(rng) for _ in range(count)), strict=True)))


def load():
    """A detector of 0.2 million parameters.

    For real weights this is all, and no training:

        return DetrForObjectDetection.from_pretrained("facebook/detr-resnet-50").eval()
    """
    backbone = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64],
        depths=[1, 2],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = DetrConfig(
        backbone_config=backbone,
        num_labels=len(KINDS),
        num_queries=CELLS,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        dropout=0,
        init_std=0.1,
    )
    torch.manual_seed(0)
    return DetrForObjectDetection(config)


def train(model, steps):
    """Learns kinds and boxes, in torch; returns the model in evaluation mode."""
    data = [torch.from_numpy(array) for array in pictures(2048, seed=0)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps + 1, pct_start=0.15)
    for number in range(1, steps + 1):
        rows = torch.randint(len(data[0]), (32,))
        images, boxes, kinds = (array[rows] for array in data)
        found = model(images)
        doubt = torch.nn.functional.cross_entropy(found.logits.mT, kinds)
        off = (found.pred_boxes - boxes)[kinds != NOTHING].abs().mean()
        optimizer.zero_grad()
        (doubt + 10 * off).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if number % max(steps // 6, 1) == 0:
            print(
                f"  step {number:>4}: cross-entropy {doubt.item():.3f}, "
                f"boxes off by {SIDE * off.item():.1f} pixels",
                flush=True,
            )
    return model.eval()


def detect(model, images):
    """Kinds, how sure the model is, and boxes: arrays of shape (batch, queries) and (…, 4)."""
    found = model(images)
    chances = jax.nn.softmax(found.logits, -1)
    return chances.argmax(-1), chances.max(-1), found.pred_boxes


def overlap(a, b):
    """Intersection over union of boxes (..., 4) given as centre and size."""
    low = np.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = np.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    both = np.clip(high - low, 0, None).prod(-1)
    return both / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - both)


def show(image, kinds, sure, boxes):
    """Prints a picture and the boxes around what was found in it."""
    canvas = np.array([list(" .:oO#")])[0][np.clip(image.mean(0) * 6, 0, 5).astype(int)]
    for kind, chance, (x, y, width, height) in zip(kinds, sure, boxes * SIDE, strict=True):
        if kind == NOTHING:
            continue
        left, right = (round(np.clip(at, 0, SIDE - 1)) for at in (x - width / 2, x + width / 2))
        top, bottom = (
            round(np.clip(at, 0, SIDE - 2) / 2) * 2 for at in (y - height / 2, y + height / 2)
        )
        canvas[[top, bottom], left : right + 1] = "-"
        canvas[top : bottom + 1, [left, right]] = "|"
        canvas[top, left : left + 8] = list(f"{KINDS[kind]:-<8}")[: max(SIDE - left, 0)][:8]
        print(f"  {KINDS[kind]:<9}{chance:.0%} at ({x:.0f}, {y:.0f}), {width:.0f} x {height:.0f}")
    for row in canvas[::2]:  # letters are twice as high as wide
        print("  " + "".join(row))


def draw(path, images, kinds, sure, boxes):
    """Saves pictures with boxes around what was found in them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 6), layout="constrained")
    for number, axes in enumerate(figure.subplots(2, 4).flat):
        axes.imshow(np.clip(images[number].transpose(1, 2, 0), 0, 1))
        axes.axis("off")
        for kind, chance, box in zip(kinds[number], sure[number], boxes[number], strict=True):
            if kind != NOTHING:
                x, y, width, height = SIDE * box
                corner = (x - width / 2, y - height / 2)
                axes.add_patch(Rectangle(corner, width, height, fill=False, color="w", lw=2))
                axes.text(*corner, f"{KINDS[kind]} {chance:.0%}", color="w", backgroundcolor="C0")
    figure.savefig(path)


def main(arguments=None):
    """Trains, converts, compares, and shows what is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="of training (default: 600)")
    parser.add_argument("--out", type=Path, help="a folder for a picture, instead of one in text")
    options = parser.parse_args(arguments)
    print("training a DETR in torch")
    start = time.perf_counter()
    model = train(load(), options.steps)
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)

    images, boxes, kinds = pictures(200, seed=1)
    start = time.perf_counter()
    converted = fmapper.convert(
        model, "jax", (torch.from_numpy(images[:2]),), dynamic_shapes=["batch, _, _, _"]
    )
    print(f"converted in {time.perf_counter() - start:.1f} s: {converted}", flush=True)
    report = fmapper.verify(model, converted, images[2:10])
    print(f"torch and JAX: {str(report).splitlines()[0]}\n")
    assert report

    found, sure, where = map(np.asarray, jax.jit(detect)(converted, images))
    there = kinds != NOTHING
    print(f"{there.sum()} shapes in {len(images)} pictures that the model has not seen:")
    print(f"  {(found == kinds)[there].mean():.1%} of them found and named")
    print(f"  {(found == kinds)[~there].mean():.1%} of the empty quarters left empty")
    print(
        f"  boxes overlap by {overlap(where, boxes)[there].mean():.0%} (intersection over union)\n"
    )
    if options.out is None:
        show(images[0], found[0], sure[0], where[0])
        return
    options.out.mkdir(parents=True, exist_ok=True)
    draw(options.out / "detections.png", images, found, sure, where)
    print(f"Saved {options.out / 'detections.png'}.")


if __name__ == "__main__":
    main()
