"""The sizes in effect: the engine's options with what they leave open decided."""

from dataclasses import dataclass

from paxserve.sharding import ONE_DEVICE, MeshShape


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes in effect, which fix the shapes of everything on the devices.

    num_pages: of each device, its null page included.
    max_num_seqs, max_num_batched_tokens: of each data group.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    mesh: MeshShape = ONE_DEVICE

    @property
    def pages_per_seq(self) -> int:
        """Pages of a sequence of max_model_len."""
        return -(-self.max_model_len // self.page_size)

    @property
    def entries_per_seq(self) -> int:
        """Width of a block table: of such a sequence's pages, those on one device."""
        return -(-self.pages_per_seq // self.mesh.kv_page)

    @property
    def pool_tokens(self) -> int:
        """Tokens that a data group's pool holds in all; null pages hold none."""
        return (self.num_pages - 1) * self.page_size * self.mesh.kv_page

    @property
    def padding_slot(self) -> int:
        """The row of the history that belongs to no sequence."""
        return self.max_num_seqs
