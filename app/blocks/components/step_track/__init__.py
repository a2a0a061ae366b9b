"""The track of a step: a canvas in the browser that draws, zooms and moves by itself."""
