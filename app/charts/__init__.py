"""Results in, Plotly figures out; nothing here knows Streamlit, and the colours come from `palette`."""
