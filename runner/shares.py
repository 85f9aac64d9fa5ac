"""Who comes next: clients share the queue by rows, however many connections each of them has.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) of clients with equal weights. The rules go on from those of
pace.py; runner/cpp/engine/shares.cc follows them too, by the same vectors. A Python program is one client: its queue
stays in order of arrival.

16. Turns: the queue is in order of turns and, of equal turns, in order of arrival. A request's turn is the latest turn
    that was started, or its client's next one if that is later; the client's next one is then the request's turn plus
    its rows. A client of which nothing waits has no next one. Each chunk of rule 2 has a turn of its own.
17. Shares: an arrival that rule 4 refuses for the rows that wait is let in all the same if its client has no more than
    its equal share with it: max_queue_size // the number of clients of which something waits, its own among them. If
    rule 12 lets it in too, the client with the most rows that wait (of equal ones the one with the lowest number) makes
    room: what it has last in the queue is refused, with all chunks of that request, and so on until the arrival fits.
18. Estimates: what arrives of a client of which nothing waits has only what runs ahead of it (rule 11).
"""

from dataclasses import dataclass

Client = int


@dataclass(slots=True)
class _Share:
    rows: int = 0  # that wait
    next_turn: int = 0  # of its next request


class Shares:
    """The clients of one queue."""

    def __init__(self) -> None:
        self._clients: dict[Client, _Share] = {}  # those of which something waits
        self._turn = 0  # the latest that was started

    def join(self, client: Client, rows: int) -> int:
        """The turn of a request that starts to wait."""
        share = self._clients.setdefault(client, _Share())
        turn = max(self._turn, share.next_turn)
        share.next_turn = turn + rows
        share.rows += rows
        return turn

    def leave(self, client: Client, rows: int) -> None:
        """A request waits no longer."""
        share = self._clients[client]
        share.rows -= rows
        if share.rows <= 0:
            del self._clients[client]

    def started(self, turn: int) -> None:
        """A request of this turn runs."""
        self._turn = max(self._turn, turn)

    def waits(self, client: Client) -> bool:
        return client in self._clients

    def entitled(self, client: Client, rows: int, capacity: int) -> bool:
        """Would `rows` more leave the client within its equal share of a queue for `capacity` rows?"""
        own = self._clients.get(client)
        count = len(self._clients) + (own is None)
        return rows + (own.rows if own else 0) <= capacity // count

    def largest(self) -> Client | None:
        """The client with the most rows that wait."""
        return max(self._clients, key=lambda client: (self._clients[client].rows, -client), default=None)
