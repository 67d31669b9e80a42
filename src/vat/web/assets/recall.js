// Under which name this tab was known before it was loaded again; '' where it is new, or the browser keeps nothing.
() => { try { return sessionStorage.getItem('vat-visit') ?? ''; } catch { return ''; } }
