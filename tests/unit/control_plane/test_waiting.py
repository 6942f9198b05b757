"""The queue of those that wait for a row."""

import random

from control_plane.kv.hashing import BlockHash
from control_plane.scheduling.sequence import Sequence, State
from control_plane.scheduling.waiting import WaitingQueue
from tests.unit.control_plane.driving import asking


def waiting(place: float, number: int = 0, num_tokens: int = 5) -> Sequence:
    return Sequence(asking(f"{place}/{number}", range(num_tokens)), (place, number), BlockHash(b""), [])


def end(queue: WaitingQueue, sequence: Sequence) -> None:
    sequence.state = State.FINISHED
    queue.note_gone(sequence)


def taken(queue: WaitingQueue) -> list[Sequence]:
    order = []
    while (first := queue.first()) is not None:
        queue.take_first()
        order.append(first)
    return order


def test_the_smallest_place_comes_first_and_ties_in_the_order_of_their_numbers() -> None:
    queue = WaitingQueue()
    third, first, second = waiting(2.0), waiting(1.0, 7), waiting(1.0, 8)
    for each in (third, second, first):
        queue.add(each)

    assert queue.first() is first
    assert len(queue) == 3
    assert taken(queue) == [first, second, third]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_who_comes_back_is_put_into_its_old_place() -> None:
    queue = WaitingQueue()
    first, second = waiting(1.0), waiting(2.0)
    queue.add(first)
    queue.add(second)
    queue.first()
    queue.take_first()

    queue.add(first)

    assert taken(queue) == [first, second]


def test_tokens_of_all_that_wait_are_counted_until_they_leave() -> None:
    queue = WaitingQueue()
    sequences = [waiting(float(number), num_tokens=10 * number) for number in (1, 2, 3)]
    for each in sequences:
        queue.add(each)
    counts = [queue.num_tokens]
    end(queue, sequences[1])
    counts.append(queue.num_tokens)
    queue.first()
    queue.take_first()
    counts.append(queue.num_tokens)

    assert counts == [60, 40, 30]
    assert (len(queue), queue.first()) == (1, sequences[2])


def test_whoever_left_is_passed_over_wherever_it_stood() -> None:
    for gone in range(4):
        queue = WaitingQueue()
        sequences = [waiting(float(number)) for number in range(4)]
        for each in sequences:
            queue.add(each)

        end(queue, sequences[gone])

        assert len(queue) == 3
        assert taken(queue) == sequences[:gone] + sequences[gone + 1 :]


def test_a_queue_that_all_have_left_is_empty() -> None:
    queue = WaitingQueue()
    sequences = [waiting(float(number)) for number in range(5)]
    for each in sequences:
        queue.add(each)

    for each in sequences:
        end(queue, each)

    assert (len(queue), queue.num_tokens, queue.first()) == (0, 0, None)
    assert not queue


def test_any_mix_of_coming_leaving_and_taking_keeps_the_order() -> None:
    draw = random.Random(7)
    queue = WaitingQueue()
    present: list[Sequence] = []
    for number in range(2000):
        move = draw.random()
        if move < 0.5 or not present:
            each = waiting(float(draw.randrange(9)), number, num_tokens=draw.randrange(1, 9))
            queue.add(each)
            present.append(each)
        elif move < 0.75:
            end(queue, present.pop(draw.randrange(len(present))))
        else:
            first = queue.first()
            assert first is min(present, key=lambda each: each.place)
            queue.take_first()
            present.remove(first)

        assert (len(queue), queue.num_tokens) == (len(present), sum(each.num_known for each in present))
