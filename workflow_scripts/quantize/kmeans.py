"""Optimal k-means in one dimension, over different values that occur some number of times; and groups of 16-bit codes.

In one dimension clusters are cells of neighbouring values, and a cell's squared error satisfies the quadrangle
inequality. Two things follow. At a price per cell the best cells (as many as pay) are found in one sweep: the best
start of the last cell never moves back as its end moves on, so each start is compared with its neighbours only (Galil
and Park, 1990). And the least error is a convex function of the number of cells, so that a price is found at which the
wanted number pays, or, where a price's best cells jump over it, one at which fewer and more cells pay alike: then the
one cells up to a certain border followed by the others from there on are as good and of the wanted number (Aggarwal,
Schieber and Tokuyama, 1994). The result is optimal by construction, up to float64's rounding: errors that differ by
less than 1e-15 of the sum of squares about the middle value are not told apart.

Every sweep also bounds the optimum from below: no number of cells does better at a price than those that were found
there. So the search may end early, as soon as it holds cells whose error is within a tolerance of the optimum.

A sweep costs about 20 ns per different value, whatever the number of cells. A search takes 2 to 3 for 16 cells, 4 to 6
for 256, and 2 to 3 of these within 0.5% of the optimum (measured on bfloat16 weights, normal to heavy-tailed).

The same numbers come out on every host: counts are integers, sums run in a fixed order in float64, and there are only
+ - * / (no function of libm), which numba rounds one by one: it fuses a product and a sum in `fastmath` only. All
compiled functions that call each other are in this file: numba's cache does not see a change in another one.
"""

import numpy as np
from numba import njit

_CODES = 1 << 16
_RUNS = 64  # of neighbouring values, from which the first price is guessed


@njit(cache=True, nogil=True)
def palettize_codes(
    groups: np.ndarray,
    decoded: np.ndarray,
    tolerance: float,
    indices: np.ndarray,
    codebook: np.ndarray,
    squares: np.ndarray,
) -> int:
    """Palettes of `groups` uint16 [G, weights] of 16-bit codes, whose values are `decoded` float64 [65536].

    Fills `indices` uint8 [G, weights], `codebook` float64 [G, levels] with float16 numbers (or infinities, beyond), and
    `squares` float64 [G, 2] with the sums of squares of weights and of their deviations. Returns the number of groups
    that are done: fewer than all where one holds a weight that is not finite.
    """
    tallies, used = np.zeros(_CODES, np.int32), np.empty(_CODES, np.uint16)
    values, counts = np.empty(_CODES), np.empty(_CODES)
    table = np.zeros(_CODES, np.uint8)
    for group in range(len(groups)):
        many = _count(groups[group], decoded, tallies, used, values, counts)
        if not (np.isfinite(values[0]) and np.isfinite(values[many - 1])):  # ascending: they lie at an end
            return group
        nearest = palettize_values(values[:many], counts[:many], tolerance, codebook[group], squares[group])
        for i in range(many):
            table[used[i]] = nearest[i]
        table[0x8000] = table[0]
        for i in range(groups.shape[1]):
            indices[group, i] = table[groups[group, i]]
    return len(groups)


@njit(cache=True, nogil=True)
def palettize_values(
    values: np.ndarray, counts: np.ndarray, tolerance: float, codebook: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """Palette of different `values` (finite, ascending) that occur `counts` times, both float64; fills as above.

    Returns the index (uint8) of the nearest entry of each value; a tie takes the lower one.
    """
    centroids = fit(values, counts, len(codebook), tolerance)
    for level in range(len(codebook)):
        codebook[level] = round_to_float16(centroids[level])
    nearest = assign(values, codebook)
    squares[:] = 0.0
    for i in range(len(values)):
        deviation = values[i] - codebook[nearest[i]]
        squares[0] += counts[i] * (values[i] * values[i])
        squares[1] += counts[i] * (deviation * deviation)
    return nearest


@njit(cache=True, nogil=True)
def fit(values: np.ndarray, counts: np.ndarray, levels: int, tolerance: float) -> np.ndarray:
    """Ascending centroids float64 [levels] for different `values` (ascending) that occur `counts` times.

    Their squared error is at most 1 + `tolerance` times the least of any real centroids. With no more values than
    levels these are the values themselves, the last one repeated.
    """
    centroids = np.empty(levels)
    if len(values) <= levels:
        centroids[: len(values)] = values
        centroids[len(values) :] = values[-1]
        return centroids
    middle = len(values) // 2
    sums = _outward_sums(values - values[middle], counts, middle)
    borders = _best_cells(sums, _first_price(values, counts, levels), levels, tolerance)
    for level in range(levels):
        start, stop = borders[level], borders[level + 1]
        mean = (sums[1, stop] - sums[1, start]) / (sums[0, stop] - sums[0, start])
        centroids[level] = values[middle] + mean
    return centroids


@njit(cache=True, nogil=True)
def assign(values: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Index (uint8) of the nearest entry of an ascending `codebook` for ascending values; a tie takes the lower one."""
    nearest = np.empty(len(values), np.uint8)
    at = 0
    for i in range(len(values)):
        above = _next_entry(codebook, at)
        while (
            above < len(codebook) and values[i] > (codebook[at] + codebook[above]) / 2
        ):  # exact: float16 numbers
            at, above = above, _next_entry(codebook, above)
        nearest[i] = at
    return nearest


@njit(cache=True, nogil=True)
def _next_entry(codebook: np.ndarray, at: int) -> int:
    above = at + 1
    while above < len(codebook) and codebook[above] == codebook[at]:
        above += 1
    return above


@njit(cache=True, nogil=True)
def round_to_float16(number: float) -> float:
    """The nearest float16 number, ties to even, as a float64; infinite beyond 65504; -0.0 becomes 0.0."""
    unit, magnitude = 2.0**-24, abs(number)
    if magnitude >= 65520.0:
        return np.inf if number > 0 else -np.inf
    while magnitude >= 2048.0 * unit:  # float16 has 11 bits; all steps are exact
        unit *= 2.0
    return np.rint(number / unit) * unit + 0.0


@njit(cache=True, nogil=True)
def _count(
    codes: np.ndarray,
    decoded: np.ndarray,
    tallies: np.ndarray,
    used: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
) -> int:
    """The sign-and-magnitude codes that occur, their values ascending, and how often: fills the last three arrays.

    -0.0 counts as 0.0. Returns how many there are; `tallies` is all 0 before and after.
    """
    for code in codes:
        tallies[code] += 1
    tallies[0] += tallies[0x8000]
    tallies[0x8000] = 0
    many = 0
    for rank in range(_CODES):
        code = 0xFFFF - rank if rank < 0x8000 else rank - 0x8000
        if tallies[code]:
            used[many], values[many], counts[many] = code, decoded[code], tallies[code]
            tallies[code] = 0
            many += 1
    return many


@njit(cache=True, nogil=True)
def _outward_sums(values: np.ndarray, counts: np.ndarray, middle: int) -> np.ndarray:
    """Running sums [3, n + 1] of count, count x value and count x value^2, from 0 at `middle` outwards on both sides.

    Outwards, so that values far out do not drown the sums of many small ones.
    """
    sums = np.zeros((3, len(values) + 1))
    for i in range(middle, len(values)):
        moment = counts[i] * values[i]
        sums[0, i + 1] = sums[0, i] + counts[i]
        sums[1, i + 1] = sums[1, i] + moment
        sums[2, i + 1] = sums[2, i] + moment * values[i]
    for i in range(middle - 1, -1, -1):
        moment = counts[i] * values[i]
        sums[0, i] = sums[0, i + 1] - counts[i]
        sums[1, i] = sums[1, i + 1] - moment
        sums[2, i] = sums[2, i + 1] - moment * values[i]
    return sums


@njit(cache=True, nogil=True)
def _first_price(values: np.ndarray, counts: np.ndarray, levels: int) -> float:
    """A guess of what the last of `levels` cells saves: 2 E / levels, with the error E of Panter and Dite (1951).

    E = (integral of the density's cube root)^3 / (12 levels^2); n weights on a width d add cbrt(n d^2) to the integral.
    """
    width = values[-1] - values[0]
    run = max(1, len(values) // _RUNS)
    total = 0.0
    for start in range(0, len(values) - 1, run):
        stop = min(start + run, len(values) - 1)
        weight = 0.0
        for i in range(start, stop):
            weight += counts[i]
        part = (values[stop] - values[start]) / width
        total += _cube_root(weight * (part * part))
    cell = width / levels
    return cell * cell * total * total * total / (6.0 * levels)


@njit(cache=True, nogil=True)
def _cube_root(number: float) -> float:
    """To about 1e-15, of a number from 0 to 2^60, by Newton: libm's cbrt is not the same on every host."""
    if number < 2.0**-180:
        return 0.0
    scale = 1.0
    while number >= 1.0:  # bring it to [1/8, 1) by exact steps
        number, scale = number / 8.0, scale * 2.0
    while number < 0.125:
        number, scale = number * 8.0, scale / 2.0
    root = (1.0 + number) / 2.0  # at most 13% off, and each step squares that
    for _ in range(4):
        root = (root + root + number / (root * root)) / 3.0
    return root * scale


@njit(cache=True, nogil=True)
def _best_cells(sums: np.ndarray, price: float, levels: int, tolerance: float) -> np.ndarray:
    """Borders [levels + 1] of cells with nearly the least error, from `sums` of more values than that; see `fit`.

    The search begins at `price`. It narrows two solutions, the best ones of fewer and of more cells, by guesses, and
    after one that did not by a price on the chord between them, which narrows them or proves that nothing is below it.
    """
    last = sums.shape[1] - 1
    fewer, more = np.array([0, last]), np.arange(last + 1)
    highest, lowest = np.inf, 0.0  # prices at which these two are best
    least, slack, on_chord = 0.0, 0, False
    while True:
        borders = _sweep(sums, price)
        found = len(borders) - 1
        if found == levels:
            return borders
        least = max(least, _error(sums, borders) + price * (found - levels))
        narrower = len(fewer) - 1 < found < len(more) - 1
        if narrower and found < levels:
            fewer, highest = borders, price
        elif narrower:
            more, lowest = borders, price
        elif on_chord:
            return _splice(fewer, more, levels)
        guess = 0.0
        if lowest == 0.0 or highest == np.inf:
            # Past the wanted number, so that both sides are there soon; what suits it best is measured.
            slack = (abs(levels - found) + levels // 32) // 4 if narrower else max(1, 4 * slack)
            guess = _price_beyond(price, found, levels, slack)
        else:
            spliced = _splice(fewer, more, levels)
            if _error(sums, spliced) <= (1.0 + tolerance) * least:
                return spliced
            if narrower:
                share = (levels + 1 - len(fewer)) / (len(more) - len(fewer))
                guess = highest + share * (lowest - highest)
        on_chord = not lowest < guess < highest
        price = guess
        if on_chord:
            price = (_error(sums, fewer) - _error(sums, more)) / (len(more) - len(fewer))


@njit(cache=True, nogil=True)
def _price_beyond(price: float, found: int, levels: int, slack: int) -> float:
    """A guess at the price for `slack` cells beyond `levels`, seen from the `found` ones of `price`.

    The error goes about with the inverse square of the number of cells, so what a cell saves with the inverse cube.
    """
    goal = levels + slack if found < levels else levels - slack
    if goal < 1:
        return 0.0
    ratio = found / goal
    return price * (ratio * ratio * ratio)


@njit(cache=True, nogil=True)
def _splice(fewer: np.ndarray, more: np.ndarray, levels: int) -> np.ndarray:
    """The first cells of `more` up to one that lies within one of `fewer`, and from its end on those of `fewer`.

    Of all places the one that gives `levels` cells. What is left of both makes cells too, and by the quadrangle
    inequality the two together have no more error than `fewer` and `more` had.
    """
    ahead = levels + 1 - len(fewer)
    at = 0
    while more[at + ahead + 1] > fewer[at + 1]:
        at += 1
    return np.concatenate((more[: at + ahead + 1], fewer[at + 1 :]))


@njit(cache=True, nogil=True)
def _error(sums: np.ndarray, borders: np.ndarray) -> float:
    """Squared error of cells about their means."""
    error = 0.0
    for cell in range(len(borders) - 1):
        start, stop = borders[cell], borders[cell + 1]
        moment = sums[1, stop] - sums[1, start]
        error += (sums[2, stop] - sums[2, start]) - moment * moment / (sums[0, stop] - sums[0, start])
    return error


# Divisions below are by counts of at least one value; error_model "numpy" leaves out the check (a quarter faster).


@njit(cache=True, nogil=True, error_model="numpy")
def _sweep(sums: np.ndarray, price: float) -> np.ndarray:
    """Borders [cells + 1] of the cells whose error and price together are least, whatever their number."""
    weights, moments, squares = sums
    last = len(weights) - 1
    # Least error and price of the values before a border, less the running sum of squares there: so a cell adds only
    # its price and what its mean takes away. And where the last of these cells starts.
    totals, came_from = np.empty(last + 1), np.zeros(last + 1, np.int64)
    totals[0] = -squares[0]
    # Starts that are the best ones yet for some later ends: ascending, each from its own first end on.
    starts, first_ends = np.zeros(last + 1, np.int64), np.ones(last + 1, np.int64)
    front, back = 0, 0
    for border in range(1, last + 1):
        if front < back and first_ends[front + 1] == border:
            front += 1
        came_from[border] = starts[front]
        totals[border] = _total(weights, moments, totals, starts[front], border) + price
        first_end = border + 1
        while back >= front:  # a start that loses to the new one at its own first end loses at all later ones
            own = max(first_ends[back], border + 1)
            if own > last or not _is_better(weights, moments, totals, border, starts[back], own):
                first_end = _first_better(weights, moments, totals, border, starts[back], own)
                break
            back -= 1
        if first_end <= last:
            back += 1
            starts[back], first_ends[back] = border, first_end
    cells, border = 0, last
    while border > 0:
        border, cells = came_from[border], cells + 1
    borders = np.empty(cells + 1, np.int64)
    borders[cells] = last
    for cell in range(cells, 0, -1):
        borders[cell - 1] = came_from[borders[cell]]
    return borders


@njit(cache=True, nogil=True, error_model="numpy")
def _total(weights: np.ndarray, moments: np.ndarray, totals: np.ndarray, start: int, end: int) -> float:
    """The total at `end` where the last cell starts at `start`, but for its price."""
    moment = moments[end] - moments[start]
    return totals[start] - moment * moment / (weights[end] - weights[start])


@njit(cache=True, nogil=True, error_model="numpy")
def _is_better(
    weights: np.ndarray, moments: np.ndarray, totals: np.ndarray, new: int, old: int, end: int
) -> bool:
    """Whether the cell up to `end` had better start at `new` than at `old`."""
    return _total(weights, moments, totals, new, end) < _total(weights, moments, totals, old, end)


@njit(cache=True, nogil=True, error_model="numpy")
def _first_better(
    weights: np.ndarray, moments: np.ndarray, totals: np.ndarray, new: int, old: int, worse: int
) -> int:
    """The first end after `worse` for which `new` is the better start, or one past the last. Mostly it is near."""
    last, step = len(weights) - 1, 1
    while worse + step <= last and not _is_better(weights, moments, totals, new, old, worse + step):
        worse, step = worse + step, 2 * step
    better = min(worse + step, last + 1)
    while better - worse > 1:
        middle = (worse + better) // 2
        if _is_better(weights, moments, totals, new, old, middle):
            better = middle
        else:
            worse = middle
    return better
