"""The example's classifier in a bare Python loop, without a server: the mark for its handler.

    python plain_loop.py MODEL PHOTO THREADS

Does what the handler does with a request: decodes the photo, transforms it, runs the network and
takes the five best classes; each thread on its own, with torch limited to one core, as the server
limits a worker where there are as many workers as cores. Prints `ready`, then, for each line read,
a number of seconds, runs so long and prints how many photos were done.
"""

import io
import sys
import threading
import time
from pathlib import Path

import torch
from handler import EfficientNetLiteClassifier
from PIL import Image

TOP = 5


def classify(network: torch.jit.ScriptModule, photo: bytes) -> tuple[list[float], list[int]]:
    """Probabilities and numbers of the best classes."""
    with torch.inference_mode():
        image = EfficientNetLiteClassifier.image_processing(Image.open(io.BytesIO(photo)))
        scores = network(image.unsqueeze(0))
        probabilities, classes = torch.topk(torch.softmax(scores, dim=1), TOP, dim=1)
        return probabilities[0].tolist(), classes[0].tolist()


def run_until(end: float, network: torch.jit.ScriptModule, photo: bytes, done: list[int]) -> None:
    """Classifies until the end and notes how often."""
    # Of this thread: OpenMP keeps the number for each thread.
    torch.set_num_threads(1)
    count = 0
    while time.monotonic() < end:
        classify(network, photo)
        count += 1
    done.append(count)


def main() -> None:
    """Runs the command."""
    model, photo, threads = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
    torch.set_num_threads(1)
    networks = [torch.jit.load(str(model)).eval() for _ in range(threads)]
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        done: list[int] = []
        running = [
            threading.Thread(target=run_until, args=(end, network, photo, done))
            for network in networks
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        print(sum(done), flush=True)


if __name__ == "__main__":
    main()
