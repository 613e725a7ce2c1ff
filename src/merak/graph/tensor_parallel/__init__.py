"""How weights are split over the tensor parallel ranks, and every rank's share of a graph."""
