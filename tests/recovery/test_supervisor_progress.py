"""However long a training takes, its course is a bounded number of points from its beginning to its end."""

from autotune.recovery.supervisor import MOST_POINTS, AttemptTimeline


def test_a_long_course_keeps_its_ends_and_few_points() -> None:
    now = [0.0]
    course, looked = AttemptTimeline(lambda: now[0]), [0]

    def size() -> int:
        looked[0] += 1
        return looked[0]

    for step in range(100_000):
        now[0] = step * 0.7
        course.note(step, size)
    assert MOST_POINTS // 3 < len(course.points) <= MOST_POINTS
    assert course.points[0] == (0.0, 0, 1)
    assert course.points[-1][0] > 0.98 * now[0]
    assert looked[0] < 3000, "memory is not looked at for every message"
    seconds = [point[0] for point in course.points]
    assert seconds == sorted(seconds)


def test_points_are_a_second_apart_at_first() -> None:
    now = [0.0]
    course = AttemptTimeline(lambda: now[0])
    for tenth in range(30):
        now[0] = tenth / 10
        course.note(tenth, lambda: 5)
    assert [point[0] for point in course.points] == [0.0, 1.0, 2.0]
