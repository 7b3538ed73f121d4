// Which keys of which sequences a block takes, from lengths in device memory: teams, units, clusters and shares are those of
// docs/kernels/decode.md. In batch-invariant mode a unit is `split_tiles`, begins at a multiple of them, and is summed by itself.
// Of a set that one block has, results meet in slots that it uses again: those of all sets would not stay in L2.
//
// The block's first keys wait for all that comes before its first segment, so there is one division in it for each set that
// is not the sequence's only one; what is needed later is computed while loads are under way.
#pragma once
#include "decode/parameters.cuh"
#if PARTS > 1
#include "ptx/cluster_barrier.cuh"
#endif
#include "ptx/global.cuh"
#include "ptx/redux.cuh"

namespace {

constexpr int kWhole = -1, kOfCluster = -2;
constexpr int kTilesOfMeeting = 256 / kTileKeys * PARTS;  // that a worker reads while others meet in device memory

// With PARTS the blocks of a cluster are one worker: they go through the same segments, each through a part of the keys.
__device__ __forceinline__ int workers() { return static_cast<int>(gridDim.x / PARTS); }
#if MIXED
// In a grid of blocks of two kinds: the number of this one among those for few rows. Written before the schedule is asked for.
__device__ __forceinline__ int& number_of_worker() {
    __shared__ int number;
    return number;
}
__device__ __forceinline__ int worker() { return number_of_worker(); }
#else
__device__ __forceinline__ int worker() { return static_cast<int>(blockIdx.x / PARTS); }
#endif
__device__ __forceinline__ int part() {
#if PARTS > 1
    return static_cast<int>(ptx::cluster_rank());
#else
    return 0;
#endif
}

// Consecutive keys of one set of query rows: what a block does at a time.
struct Segment {
    int sequence, head;        // of keys and values
    int first_row, rows;       // packed query rows of the set; all rows of the sequence
    int query_start;           // row of query at which the sequence begins
    int past;                  // query i stands at position i + past
    int key_start;             // where its keys begin, if they are packed
    int tile;                  // the first
    int first_key, last_key;   // of the segment, one past
    int all_begin, all_end;    // keys that all rows see
    int passes;                // 0: there is no such segment
    int slot;                  // where its result is left; or kWhole: it is written; or kOfCluster
    int unit, within, units;   // of the grid; of the set; of all of it
#if TREE
    int tree_tile;             // the first with keys of the sequence's queries; or kNoTree
    uint16 unseen[kTreeTiles]; // of these tiles' keys, a bit for each that no row of the sequence sees: see find_hidden
    uint32 hidden[kTreeTiles][kRows / 2];  // a bit for each that a row does not see; 16 for a row
#endif
};

// Of results of a set: the i-th lies in slot `first` + i * `step`, and the first of all `extra` further.
struct Slots {
    int first, step, extra;

    __device__ __forceinline__ int of(int i) const { return first + i * step + (i == 0 ? extra : 0); }
};

// Where the results of a set that several segments share meet: pieces in groups, then groups.
struct Meeting {
    int first_block;                          // of the set: the first that has a piece
    bool several;                             // blocks
    Slots pieces, results;                    // of the set; of its groups
    int first_piece, end_piece;               // of the segment's group; from 0 on where a block has the set alone
    int group, groups;
    int group_first_block, group_blocks;      // those that have pieces of the group
    bool complete;                            // whether the block has left all that it has of the group
    int own;                                  // of the group's pieces, if each block has one
    bool ends;                                // whether it is the block's last segment
};

#if DEPENDENT
// While the predecessor runs: lengths, which may yet change, come into L2, and of small heads, of which few blocks have any keys,
// the argument into the constant cache. True, as the first two words are an address, but the compiler cannot tell.
__device__ __forceinline__ bool warm_up(const Parameters& p) {
    const uint32* const words = reinterpret_cast<const uint32*>(&p);
    uint32 any = words[1];
#pragma unroll
    for (int i = 0; i < (HEAD_DIM > 64 ? 1 : static_cast<int>(sizeof(Parameters) / 4)); i += 16) any |= words[i];
    const int at = 32 * static_cast<int>(threadIdx.x);
    if (at <= p.batch) prefetch_l2(p.query_starts + at);
    if (at < p.batch) prefetch_l2((p.key_lengths != nullptr ? p.key_lengths : p.key_starts) + at);
    return any != 0;
}
#endif

// Called, as most blocks need none, and inlined it lies between the instructions that all wait for.
__device__ __noinline__ int quotient(int x, int y) { return x / y; }

// With MIXED, so many packed rows, sequences with more are other blocks' work; with ONLY another launch's.
__device__ __forceinline__ bool is_others(const Parameters& p, int queries) {
    if (ONLY == 1) return queries > 1;
    if (ONLY == 2) return queries == 1;
    return MIXED > 0 && queries * p.group > MIXED;
}

// Whether partial sums begin at each multiple of some number of keys. With MIXED they never do.
__device__ __forceinline__ bool splits(const Parameters& p) { return MIXED == 0 && p.split_tiles > 0; }

// Shares of so many teams. Their number is the host's, unless blocks of the grid have other work.
__device__ __forceinline__ int by_teams(const Parameters& p, int x, int teams) {
    return MIXED > 0 ? quotient(x, teams) : divide(x, p.by_teams);
}

__device__ __forceinline__ int tiles_of(int keys) { return static_cast<int>(static_cast<uint32>(keys + kTileKeys - 1) / kTileKeys); }

// What a sequence asks for.
struct Extent {
    int query_start, key_start;  // the latter if keys are packed
    int rows, past, first_key, keys;
    int row_blocks, first_tile, tiles;

    Extent() = default;
    __device__ __forceinline__ Extent(const Parameters& p, int sequence) : key_start(0) {
        query_start = p.query_starts[sequence];
        const int queries = p.query_starts[sequence + 1] - query_start;
        if (PAGES > 0) {
            keys = p.key_lengths[sequence];
        } else {
            key_start = p.key_starts[sequence];
            keys = p.key_lengths != nullptr ? p.key_lengths[sequence] : p.key_starts[sequence + 1] - key_start;
        }
        rows = is_others(p, queries) ? 0 : max(0, queries * p.group);
        past = keys - queries;
        first_key = max(0, begin_of_seen(p, past));
        // The last query sees the most keys; without `right` all.
        if (first_key >= keys) rows = 0;
        row_blocks = static_cast<int>(static_cast<uint32>(rows + kRows - 1) / kRows);
        first_tile = static_cast<int>(static_cast<uint32>(first_key) / kTileKeys);
        if (splits(p)) first_tile = quotient(first_tile, p.split_tiles) * p.split_tiles;
        tiles = rows == 0 ? 0 : tiles_of(keys) - first_tile;
    }
};

// `unit_tiles`: a power of two, unless it is `split_tiles`.
__device__ __forceinline__ int unit_count(const Parameters& p, int tiles, int unit_tiles) {
    return splits(p) ? quotient(tiles + unit_tiles - 1, unit_tiles) : (tiles + unit_tiles - 1) >> (__ffs(unit_tiles) - 1);
}

// Blocks that go through the same keys, and which heads are this one's: it depends on no length.
struct Team {
    int count, index, first_head, heads;

    __device__ __forceinline__ Team(const Parameters& p, int workers)
        : count(divide(workers, p.by_team)), index(divide(worker(), p.by_team)),
          heads(divide(p.kv_heads, p.by_team)) {
        first_head = (worker() - index * p.team) * heads;
    }
};

// The block's place in its share. Only one lane reads and writes it.
struct Cursor {
    int unit, end;                   // of all teams
    int team, first_head, heads;     // the block's
    int share;                       // units of a block
    int scratch;                     // in batch-invariant mode: first unit of the first set that is the block's alone, or -1
    int unit_tiles;
    bool gathers;                    // a set is a cluster's
    int sequence;
    int within, units;               // unit within its set, and all of those
    int head, row_block, row_blocks;
    int rows, past, first_key, keys, first_tile, query_start, key_start;  // of the sequence

    // Of the sequence, all its sets'.
    __device__ __forceinline__ int all_units() const { return heads * row_blocks * units; }

    __device__ __forceinline__ void enter(int of_sequence, const Extent& extent, const Parameters& p) {
        sequence = of_sequence;
        query_start = extent.query_start;
        key_start = extent.key_start;
        rows = extent.rows;
        past = extent.past;
        first_key = extent.first_key;
        keys = extent.keys;
        row_blocks = extent.row_blocks;
        first_tile = extent.first_tile;
        if (CLUSTER > 1 && gathers) unit_tiles = (extent.tiles + CLUSTER - 1) / CLUSTER;
        units = CLUSTER > 1 && gathers ? CLUSTER : unit_count(p, extent.tiles, unit_tiles);
        within = head = row_block = 0;
    }
};

constexpr int kUnitSizes = kPass >= 16 ? 5 : kPass >= 8 ? 4 : kPass >= 4 ? 3 : kPass >= 2 ? 2 : 1;

constexpr int kMostPieces = 32;    // that are combined by one block, if each block has one
constexpr int kGroupPieces = 12;   // of a group, if there are more

// Groups of pieces in batch-invariant mode, where they may depend on nothing but how many pieces the set has. Small ones are often one
// block's, which adds them without waiting for another; but each time a block adds takes a microsecond.
struct SplitGroups {
    int log2;  // of the pieces of one

    __device__ __forceinline__ explicit SplitGroups(int units) : log2(units <= 32 || units > 128 ? 4 : units <= 64 ? 2 : 3) {}
    __device__ __forceinline__ int pieces() const { return 1 << log2; }
    __device__ __forceinline__ int count(int units) const { return (units + pieces() - 1) >> log2; }
    // Of a set whose units one block has: a group's result lies where its first piece was, and the next group behind it. So no set
    // takes more slots than it has pieces.
    __device__ __forceinline__ int slot_of_own(int within) const { return (within >> log2) + (within & pieces() - 1); }
};
__device__ __forceinline__ bool has_alone(const Cursor& cursor, int first_unit, int units) {
    return first_unit >= cursor.team * cursor.share && first_unit + units <= cursor.end;
}
// Of a unit of all teams.
__device__ __forceinline__ int slot_of_unit(const Parameters& p, const Cursor& cursor, int unit) {
    return unit * p.team + worker() - cursor.team * p.team;
}

// One lane: a segment of the block's share. `cursor` goes past it.
__device__ __forceinline__ void take_segment(const Parameters& p, Cursor& cursor, Segment& segment) {
    const int unit = cursor.unit, end = cursor.end, unit_tiles = cursor.unit_tiles;
    const int within = cursor.within, units = cursor.units, keys = cursor.keys, rows = cursor.rows, past = cursor.past;
    const int taken = splits(p) ? 1 : min(units - within, end - unit);
    const int last_tile = tiles_of(keys);  // one past
    const int begin_tile = cursor.first_tile + within * unit_tiles;
    int tile = CLUSTER > 1 ? min(begin_tile, last_tile) : begin_tile;
    int end_tile = min(tile + taken * unit_tiles, last_tile);
    if (PARTS > 1) {
        const int each = (end_tile - tile + PARTS - 1) / PARTS;
        tile = min(tile + part() * each, end_tile);
        end_tile = min(tile + each, end_tile);
    }
    const int first_row = cursor.row_block * kRows;
    const int first_key = max(cursor.first_key, kTileKeys * tile), last_key = min(keys, kTileKeys * end_tile);
    segment.sequence = cursor.sequence;
    segment.head = cursor.first_head + cursor.head;
    segment.first_row = first_row;
    segment.rows = rows;
    segment.query_start = cursor.query_start;
    segment.past = past;
    segment.key_start = cursor.key_start;
    segment.tile = tile;
    segment.first_key = first_key;
    segment.last_key = last_key;
    // The first row of the set sees the fewest keys to the right, the last one the fewest to the left.
    const int last_row = min(first_row + kRows, rows) - 1;
    const int first_position = divide(first_row, p.by_group) + past;
    const int last_position = divide(last_row, p.by_group) + past;
    segment.all_begin = max(first_key, begin_of_seen(p, last_position));
    segment.all_end = min(last_key, end_of_seen(p, first_position));
#if TREE
    segment.tree_tile = kNoTree;
    if (rows <= kTreeQueries * p.group) {
        segment.tree_tile = max(0, past) / kTileKeys;
        segment.all_end = min(segment.all_end, past);
    }
#endif
    segment.passes = (end_tile - tile + kPass - 1) / kPass;
    if (CLUSTER > 1 || PARTS > 1) segment.passes = max(1, segment.passes);  // a part may be empty
    segment.unit = unit;
    segment.within = within;
    segment.units = units;
    // A block has two slots: for the set that it goes on with, and for the one that it begins.
    segment.slot = CLUSTER > 1 && cursor.gathers ? kOfCluster : taken == units ? kWhole : 2 * worker() + (within == 0 ? 1 : 0);
    if (splits(p) && units > 1) {
        int of_unit = unit;
        if (has_alone(cursor, unit - within, units)) {
            if (cursor.scratch < 0) cursor.scratch = unit - within;
            of_unit = cursor.scratch + SplitGroups(units).slot_of_own(within);
        }
        segment.slot = slot_of_unit(p, cursor, of_unit);
    }
    cursor.unit = unit + taken;
    cursor.within = within + taken;
    if (within + taken == units) {
        cursor.within = 0;
        if (++cursor.row_block == cursor.row_blocks) {
            cursor.row_block = 0;
            ++cursor.head;
        }
    }
}

// The same of the next one, if there is any.
__device__ __forceinline__ void next_segment(const Parameters& p, Cursor& cursor, Segment& segment) {
    if (cursor.unit >= cursor.end) {
        segment.passes = 0;
        return;
    }
    if (cursor.head == cursor.heads) {  // there is more, so there is a sequence with keys
        int sequence = cursor.sequence + 1;
        Extent extent(p, sequence);
        while (extent.rows == 0) extent = Extent(p, ++sequence);
        cursor.enter(sequence, extent, p);
    }
    take_segment(p, cursor, segment);
}

// All lanes of a warp: the block's first segment, and where the next one begins. Nothing is read twice where a lane has one sequence.
__device__ __forceinline__ void begin_share(const Parameters& p, Team team, Cursor& cursor, Segment& segment, int lane) {
    const int each = (p.batch + 31) / 32;
    const int from = min(lane * each, p.batch), to = min(from + each, p.batch);
    int counts[kUnitSizes] = {};  // units of the lane's sequences, for each size of a unit
    int longest = 0, own_sets = 0;
    Extent first;
#pragma unroll 1
    for (int sequence = from; sequence < to; ++sequence) {
        const Extent extent(p, sequence);
        if (sequence == from) first = extent;
        const int sets = team.heads * extent.row_blocks;
        longest = max(longest, extent.tiles);
        own_sets += sets;
        if (splits(p)) {
            counts[0] += sets * unit_count(p, extent.tiles, p.split_tiles);
        } else {
#pragma unroll
            for (int i = 0; i < kUnitSizes; ++i) counts[i] += sets * ((extent.tiles + (1 << i) - 1) >> i);
        }
    }
    int own = counts[0], unit_tiles = p.split_tiles;
    bool gathers = false;
    if (!splits(p)) {
        const int all_tiles = total_of_warp(counts[0]);
        longest = static_cast<int>(most<32>(static_cast<uint32>(longest)));
        unit_tiles = 1;
#pragma unroll
        for (int i = 1; i < kUnitSizes; ++i) {
            // Sets that a block goes through at a time are not cut: blocks that share one lose more by meeting. A tile takes
            // a block about five times as long to read as one more partial result takes to combine: together that is the
            // least where a block has the square root of a fifth of a set's tiles. That was measured with tiles of 16 keys. Of
            // 64 there are two sizes, and the larger one but for few tiles.
            const int less = 1 << (i - 1);
            if (longest <= kPass || less * team.count < all_tiles || 4 * less * less < longest) {
                unit_tiles = 2 * less;
                own = counts[i];
            }
        }
        if (CLUSTER > 1 || PARTS > 1) {
            const int equal = by_teams(p, all_tiles + team.count - 1, team.count), sets = total_of_warp(own_sets);
            const int most_tiles = equal + equal / 16 + kTilesOfMeeting;
            if (PARTS > 1 && sets <= team.count && longest <= most_tiles) {  // a worker has a set
                unit_tiles = 1 << (32 - __clz(longest));
                own = own_sets;
            }
            gathers = CLUSTER > 1 && CLUSTER * sets <= team.count && longest <= CLUSTER * most_tiles;
            if (gathers) {
                own = CLUSTER * p.team * own_sets;
                team.index = static_cast<int>(blockIdx.x);
                team.heads = p.kv_heads;
                team.first_head = 0;
            }
        }
    }
    int up_to = own;  // and with all lanes before
    if (p.batch > 1) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int x = __shfl_up_sync(0xffffffffu, up_to, distance);
            if (lane >= distance) up_to += x;
        }
    }
    const int all = __shfl_sync(0xffffffffu, up_to, p.batch > 1 ? 31 : 0);
    const int share = gathers ? 1 : max(1, by_teams(p, all + team.count - 1, team.count));
    const int begin = min(team.index * share, all);
    const int before = up_to - own;
    if (lane == 0 && begin == all) segment.passes = 0;
    if (before <= begin && begin < up_to) {  // one lane, or none
        Cursor at;
        at.share = share;
        at.unit_tiles = unit_tiles;
        at.gathers = gathers;
        at.scratch = -1;
        at.team = team.index;
        at.first_head = team.first_head;
        at.heads = team.heads;
        at.unit = begin;
        at.end = min(begin + share, all);
        at.enter(from, first, p);
        int left = begin - before;  // units before the block's first, from the sequence on
        while (left >= at.all_units()) {
            left -= at.all_units();
            at.enter(at.sequence + 1, Extent(p, at.sequence + 1), p);
        }
        const int set = left < at.units ? 0 : left < 2 * at.units ? 1 : quotient(left, at.units);
        at.within = left - set * at.units;
        at.head = at.row_blocks == 1 ? set : quotient(set, at.row_blocks);
        at.row_block = at.row_blocks == 1 ? 0 : set - at.head * at.row_blocks;
        take_segment(p, at, segment);
        cursor = at;
    }
    __syncwarp();
}

// One lane: how the results of a segment's set meet, unless it is whole.
__device__ __forceinline__ void arrange(const Parameters& p, const Cursor& cursor, const Segment& segment, Meeting& meeting) {
    if (segment.passes == 0 || segment.slot < 0) return;
    const int share = cursor.share, within = segment.within, units = segment.units;
    const int first_unit = segment.unit - within;
    const auto block_of = [&](int team) { return worker() + (team - cursor.team) * p.team; };
    if (splits(p)) {
        const SplitGroups groups(units);
        const int begin = within & -groups.pieces(), end = min(begin + groups.pieces(), units);
        meeting.complete = within + 1 == end || segment.unit + 1 == cursor.end;
        if (!meeting.complete) return;
        meeting.group = begin >> groups.log2;
        meeting.groups = groups.count(units);
        meeting.first_piece = begin;
        meeting.end_piece = end;
        meeting.group_blocks = 1;
        meeting.several = !has_alone(cursor, first_unit, units);
        if (meeting.several) {
            const int group_first_block = (first_unit + begin) / share;
            meeting.first_block = block_of(first_unit / share);
            meeting.group_first_block = block_of(group_first_block);
            meeting.group_blocks = (first_unit + end - 1) / share - group_first_block + 1;
            meeting.pieces = {slot_of_unit(p, cursor, first_unit), p.team, 0};
            meeting.results = {meeting.pieces.first, p.team << groups.log2, 0};
        } else {
            meeting.first_piece = 0;
            meeting.end_piece = end - begin;
            meeting.results = {slot_of_unit(p, cursor, cursor.scratch), p.team, 0};
            meeting.pieces = {meeting.results.of(meeting.group), p.team, 0};
        }
    } else {
        const int first_block = first_unit / share, last_block = (first_unit + units - 1) / share;
        meeting.first_block = block_of(first_block);
        meeting.several = last_block > first_block;
        const int pieces = last_block - first_block + 1, size = pieces > kMostPieces ? kGroupPieces : pieces;
        const int group = (cursor.team - first_block) / size, begin = group * size, end = min(begin + size, pieces);
        meeting.group = group;
        meeting.groups = (pieces + size - 1) / size;
        meeting.first_piece = begin;
        meeting.end_piece = end;
        meeting.group_first_block = block_of(first_block + begin);
        meeting.group_blocks = end - begin;
        meeting.complete = true;
        meeting.own = cursor.team - first_block - begin;
        meeting.ends = cursor.unit >= cursor.end;
        // A block's slot for a set that it begins is the second.
        meeting.pieces = {2 * meeting.first_block, 2 * p.team, 1};
        meeting.results = {2 * meeting.first_block, 2 * p.team * size, 1};
    }
}

// Where a packed query row lies in its sequence.
struct Row {
    int position, head;  // head within the group
};

__device__ __forceinline__ Row locate(int row, const Parameters& p) {
    const int position = divide(row, p.by_group);
    return {position, row - position * p.group};
}

#if TREE
// By the block's last warp: what a segment's rows do not see of the keys of queries, if it has some of them.
__device__ __forceinline__ void find_hidden(const Parameters& p, Segment& segment) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x / 32 != WARPS - 1 || segment.tree_tile > (segment.last_key - 1) / kTileKeys) return;
    const uint64* const words = p.tree_mask + segment.query_start;
    const uint64 unseen = unseen_by_all(words, divide(segment.rows, p.by_group), p.right, lane);
    const int first = kTileKeys * segment.tree_tile - segment.past;
    const uint64 word = words[locate(min(segment.first_row + lane % kRows, segment.rows - 1), p).position];
#pragma unroll
    for (int tile = 0; tile < kTreeTiles; ++tile) {
        const uint32 own = hidden_from(word, first + kTileKeys * tile) & 0xffff;
        const uint32 next = __shfl_xor_sync(0xffffffffu, own, 1);
        if (lane < kRows && lane % 2 == 0) segment.hidden[tile][lane / 2] = own | next << 16;
        if (lane == 0) segment.unseen[tile] = bits_from(unseen, first + kTileKeys * tile) & 0xffff;
    }
}
#endif

}  // namespace
