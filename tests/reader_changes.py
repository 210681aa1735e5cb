"""Changes to a good file, for tests of what readers refuse and accept: each is what it does, and a function of the file."""
import h5py


def attribute(where, name, value, **kind):
    def change(f):
        if value is None:
            del f[where].attrs[name]
        else:
            f[where].attrs.create(name, value, **kind)
    return f"{where}@{name} = {value!r}", change


def element(where, index, value):
    def change(f):
        data = f[where][...]
        data[index] = value
        f[where][...] = data
    return f"{where}[{index}] = {value}", change


def dataset(where, make_data, **options):
    """Replace a dataset by make_data of its values; None: delete it."""
    def change(f):
        old = f[where][...] if isinstance(f.get(where), h5py.Dataset) else None
        if where in f:
            del f[where]
        data = make_data(old)
        if data is not None:
            f.create_dataset(where, data=data, **options)
    return f"{where} replaced", change
