"""What an H200 runs at a time: what the estimates of the small-shape kernel's time were measured on."""

from __future__ import annotations

MULTIPROCESSORS = 132
CLUSTERS_AT_ONCE = {
    1: {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15},
    2: {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 8: 30, 16: 14},
    3: {1: 396, 2: 198, 4: 92},
}
"""By the blocks that a multiprocessor holds and the blocks of a cluster: clusters that run at a time, as the driver
says (cuOccupancyMaxActiveClusters). Fewer than by number, as a cluster must find room in one GPC."""
