"""Who runs next, and in which pages: a queue of requests, batch rows, and the cache's free pages."""

from collections import deque

import numpy as np

from specjax.engine.request import Request

DUMMY_PAGE = 0  # unused table entries point here; nothing is ever read from it


class Scheduler:
    """First come, first served: a request starts when a batch row and enough pages for its whole budget are free.

    Pages are reserved for the request's limit at its start, so a running request is never preempted.
    """

    def __init__(self, batch: int, page_size: int | None, row_pages: int):
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.page_size, self.row_pages = page_size, row_pages
        self._free_rows = list(range(batch))
        self._free_pages = list(range(1, 1 + batch * row_pages)) if page_size else []
        self._held: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free_pages)

    def admit(self, slots: int) -> tuple[int, Request, np.ndarray | None] | None:
        """Start the next waiting request: its row, itself, and its row of the page table (None: dense cache).

        Args:
            slots: cache slots that the request may need in all.
        """
        if not self.waiting or not self._free_rows:
            return None
        table = None
        need = 0 if self.page_size is None else min(-(-slots // self.page_size), self.row_pages)
        if need > len(self._free_pages):
            return None
        row, request = min(self._free_rows), self.waiting.popleft()
        self._free_rows.remove(row)
        if self.page_size is not None:
            self._held[row] = [self._free_pages.pop(0) for _ in range(need)]
            table = np.full((self.row_pages,), DUMMY_PAGE, np.int32)
            table[:need] = self._held[row]
        self.running[row] = request
        return row, request, table

    def forget(self, index: int) -> bool:
        """Take request `index` off the queue; whether it was there."""
        found = next((request for request in self.waiting if request.index == index), None)
        if found is not None:
            self.waiting.remove(found)
        return found is not None

    def release(self, row: int) -> Request:
        """Request `row` is over; its row and pages are free."""
        self._free_rows.append(row)
        self._free_pages.extend(self._held.pop(row, []))
        return self.running.pop(row)
